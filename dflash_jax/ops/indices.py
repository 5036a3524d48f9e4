"""Reads and writes at indices of which some are out of range, those of idle rows and dead columns.

jax counts a negative index from the end, also where it drops or fills what is out of range: -1
would be the last slot. With these keywords of `x.at[index]` it is out of range like any other.
"""

DROP = {"mode": "drop", "wrap_negative_indices": False}  # of set and add: writes nothing there
FILL = {"mode": "fill", "wrap_negative_indices": False}  # of get: reads fill_value there
