"""``python -m lightning_topk bench``: times training steps with DDP, its hooks and ours, on the user's own machines.

:mod:`.peers` lists the exchanges, :mod:`.loop` times them in turns, :mod:`.verdict` compares the times, and
:mod:`.command` starts the ranks and prints the result.
"""
