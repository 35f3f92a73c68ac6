"""Speed, measured against memory, links and the alternatives: ``python examples/lab bench NAME``.

Machines are noisy, so verdicts compare times of one run. A missed target, and every faster peer, is printed as FAIL.
"""
