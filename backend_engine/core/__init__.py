"""The engine core, a process of its own: scheduler, slots, pages, sampler, runner and the loop that joins them.

The loop is `ready -> launch -> commit`; `messages` is all that it says to the frontend.
"""
