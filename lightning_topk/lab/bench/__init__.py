"""Speed, measured against memory, links and the alternatives: ``python -m lightning_topk bench NAME``.

Machines are noisy: what is judged are ratios of times taken in one run. A missed target, and every peer that is faster,
is printed as FAIL.
"""
