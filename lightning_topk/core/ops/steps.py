"""Steps of SGD and Adam with adapted momentum on a CPU, each one pass over memory, compiled by numba.

:mod:`lightning_topk.runtime.momentum` has the rule. Most entries are not delivered. A step first scans a tile
for delivered entries and computes their momentum buffers and new values one by one; the work for every entry (counting
the steps that it waits, weight decay, Adam's second moment) runs over the whole tile, vectorised. All arrays are flat
float32, except ``waited``, uint8: the steps that each entry has waited since its last delivery, at most 254.
"""

from __future__ import annotations

import numpy as np

from lightning_topk.core.ops.loops import compiled, marked, trailing_zeros

TILE = 2048
"""Elements per step of the loop: all their arrays stay in a core's cache."""


@compiled
def sgd_step(x, g, b, waited, fade, coast, m, a, lr, decay, shrink, nesterov, sign):
    """One step of ``torch.optim.SGD``.

    ``fade[d]`` is m^d and ``coast[d]`` is m + ... + m^d, for an entry that waited d steps. ``shrink`` is lr a decay /
    (1 - m), and ``sign`` is -1 to maximize.
    """
    place, moved, marks = np.empty(TILE, np.int64), np.empty(TILE, np.float32), np.zeros(TILE, np.uint8)
    for begin in range(0, len(x), TILE):
        end = min(begin + TILE, len(x))
        x_, g_, b_, waited_ = x[begin:end], g[begin:end], b[begin:end], waited[begin:end]
        count = _delivered(g_, marks, place)
        for n in range(count):
            i = place[n]
            d, given = waited_[i], sign * g_[i] + decay * x_[i]
            v = m * b_[i] + a * given
            step = v + coast[d] * v
            if nesterov:
                step = given + m * step
            moved[n] = x_[i] - lr * step
            b_[i] = fade[d] * v
            waited_[i] = 255
        _wait(waited_)
        if decay != 0:
            for i in range(len(x_)):
                x_[i] -= shrink * x_[i]
        for n in range(count):
            x_[place[n]] = moved[n]


@compiled
def adam_step(x, g, b, q, waited, fade, coast, m, a, beta2, rest, step_size, root, eps, shrink, sign):
    """One step of ``torch.optim.Adam`` or ``AdamW``, without amsgrad and with decoupled weight decay.

    Arguments as in :func:`sgd_step`, and ``q`` is the second moment, ``a`` is 1 - m, ``rest`` 1 - beta2, ``step_size``
    lr / (1 - m^t), ``root`` the square root of 1 - beta2^t, and ``shrink`` lr times the weight decay.
    """
    place, moved, square = np.empty(TILE, np.int64), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    marks = np.zeros(TILE, np.uint8)
    for begin in range(0, len(x), TILE):
        end = min(begin + TILE, len(x))
        x_, g_, b_, q_, waited_ = x[begin:end], g[begin:end], b[begin:end], q[begin:end], waited[begin:end]
        count = _delivered(g_, marks, place)
        for n in range(count):
            i = place[n]
            d, given = waited_[i], sign * g_[i]
            v = m * b_[i] + a * given
            square[n] = beta2 * q_[i] + rest * given * given
            step = (v + coast[d] * v) / (np.sqrt(square[n]) / root + eps)
            moved[n] = x_[i] - shrink * x_[i] - step_size * step
            b_[i] = fade[d] * v
            waited_[i] = 255
        _wait(waited_)
        for i in range(len(q_)):
            q_[i] *= beta2
        if shrink != 0:
            for i in range(len(x_)):
                x_[i] -= shrink * x_[i]
        for n in range(count):
            x_[place[n]], q_[place[n]] = moved[n], square[n]


@compiled
def _delivered(g, marks, place):
    """Writes the places of the nonzero entries in a tile of a gradient; returns their number."""
    for i in range(len(g)):
        marks[i] = np.uint8(g[i] != 0)
    for i in range(len(g), TILE):
        marks[i] = 0
    words, count = marks.view(np.uint64), 0
    for w in range(TILE // 64):
        word = marked(words, w)
        while word:
            place[count] = 64 * w + np.int64(trailing_zeros(word))
            count += 1
            word &= word - np.uint64(1)
    return count


@compiled
def _wait(waited):
    """Counts a step: 255 becomes 0, and 254 stays."""
    for i in range(len(waited)):
        waited[i] = min(waited[i], 253) + 1 if waited[i] != 255 else 0
