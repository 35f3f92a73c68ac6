"""Tensor operations of the compression: ``reference`` is the plain torch version and the oracle of any faster one."""
