"""FSDP2's side: shards become jobs for the lane.

:mod:`.hook` is FSDP's all-reduce hook and ``attach``; :mod:`.param_groups` reads what FSDP reduces together;
:mod:`.checkpoint` shards residuals as the parameters are.
"""
