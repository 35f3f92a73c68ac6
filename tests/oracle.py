"""The papers' algorithms in NumPy, written from their descriptions and without the library's code."""

import numpy as np


def top(vector: np.ndarray, k: int) -> np.ndarray:
    """``vector`` with all but its k largest entries (by magnitude) zeroed."""
    kept = np.zeros_like(vector)
    largest = np.argsort(-np.abs(vector), kind="stable")[:k]
    kept[largest] = vector[largest]
    return kept


def bfloat16(vector: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, to nearest even."""
    bits = vector.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


class BidirectionalTopK:
    """Zou 2022, in gradient scale: error feedback on the workers and on the server.

    Of each shard (an index array; one of everything is the thesis's single server) a worker sends ``kept`` entries and
    the server ``server_kept``, or every nonzero one if that is None. ``rounding`` is the wire's.
    """

    def __init__(self, workers, numel, kept, server_kept, shards, rounding=lambda v: v):
        self.e = np.zeros((workers, numel), np.float32)
        self.E = np.zeros(numel, np.float32)
        self.kept, self.server_kept, self.shards, self.rounding = kept, server_kept, shards, rounding

    def step(self, gradients: np.ndarray) -> np.ndarray:
        """One step: returns the vector ``[numel]`` that every worker receives for gradients ``[workers, numel]``."""
        u = np.zeros_like(self.e)
        for i, g in enumerate(gradients):
            a = self.e[i] + g
            for shard in self.shards:
                u[i, shard] = self.rounding(top(a[shard], self.kept))
            self.e[i] = a - u[i]
        v = self.E + u.sum(0) / len(u)
        q = np.zeros_like(v)
        for shard in self.shards:
            k = len(shard) if self.server_kept is None else self.server_kept
            q[shard] = self.rounding(top(v[shard], k))
        self.E = v - q
        return q


def shards_of(numel: int, servers: int, block: int) -> list[np.ndarray]:
    """Elements of each server's shard: blocks of consecutive ones, of the servers in turn."""
    shards: list[list[int]] = [[] for _ in range(servers)]
    for number, start in enumerate(range(0, numel, block)):
        shards[number % servers].extend(range(start, min(start + block, numel)))
    return [np.array(shard, dtype=np.int64) for shard in shards]


class DeepGradientCompression:
    """Lin et al. 2018, algorithm 4, without sampling: momentum correction, factor masking and local clipping.

    A worker clips its gradient to the norm ``clip`` and sends ``kept`` entries.
    """

    def __init__(self, workers: int, numel: int, momentum: float, kept: int, clip: float) -> None:
        self.u, self.v = np.zeros((2, workers, numel), np.float32)
        self.momentum, self.kept, self.clip = momentum, kept, clip

    def step(self, gradients: np.ndarray) -> np.ndarray:
        """One step: returns the mean ``[numel]`` of the sent vectors for gradients ``[workers, numel]``."""
        sent = np.zeros_like(self.v)
        for i, g in enumerate(gradients):
            self.u[i] = self.momentum * self.u[i] + g * min(1.0, self.clip / np.linalg.norm(g))
            self.v[i] += self.u[i]
            sent[i] = top(self.v[i], self.kept)
            self.u[i][sent[i] != 0] = 0
            self.v[i] -= sent[i]
        return sent.mean(0)
