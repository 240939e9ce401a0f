"""The shapes of answers, for the API document. Handlers build plain maps; tests hold them to these.

A file for each kind of route: a shape stands in the file of the routes that answer with it.
"""
