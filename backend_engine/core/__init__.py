"""The engine core: scheduler, slots, pages, sampler, runner and the loop `ready -> launch -> commit`, in a process of its own."""
