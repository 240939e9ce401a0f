"""A fleet in simulated time: the world, traces, the policies that people use, and what they are worth.

`world.py`, `unit.py`, `kv.py`, `steps.py`, `geography.py` are the world. They know what no decision may know
(lengths of answers, hidden speeds), so they import nothing that decides, and policies see only what `seen.py`
names.
"""
