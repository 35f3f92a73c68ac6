"""The FSDP2 adapter: turns shards into jobs for the lane.

:mod:`.hook` has FSDP's all-reduce hook and ``attach``; :mod:`.param_groups` reads FSDP's parameter groups;
:mod:`.checkpoint` shards residuals like the parameters.
"""
