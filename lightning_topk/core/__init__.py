"""Compression and exchange of one bucket, without I/O.

May import: torch, ``schedule`` and this wing. It knows no settings, no process group and no Lightning. Read
:mod:`lightning_topk.core.exchange` first: it follows a gradient from the bucket to the bytes and back.
"""
