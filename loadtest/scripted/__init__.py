"""The scripted upstream: an OpenAI-compatible server that behaves, request by request, as the request's prompt asks.

It writes down what it really did and when (`Witness`), so that the truth is what happened and not what was asked for:
comparisons with it are exact, however busy the machine is.
"""
