"""Loops that numba compiles: the steps of an exchange on the CPU, without the GIL.

Numba needs no C compiler, and caches compiled code on disk. A worker sends a bucket in these steps::

    send     sampled_threshold from a sample of the sum
             scan              e <- fade e + x, x <- 0, and entries that reach the threshold, shard by shard: one pass
             keep_largest      the k largest of these, exactly
             write_values      quantised, 64 at a time
             write_positions   in the Elias-Fano code
             add_at            e <- e - what arrives

    receive  read_positions
             read_values
             add_at            out <- out + what has arrived

``catch_up`` adapts momentum. :mod:`lightning_topk.core.ops.cpu` calls all three. ``layout`` is :attr:`.Layout.sizes`,
``form`` the format of payloads, ``sample`` says which entries to sample, ``places`` are positions in a shard. Vectors
are float32. All loops are in one file, since numba's disk cache looks for changes in the file of the called function
only, not in the files of its callees.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from lightning_topk.core.layout import BLOCK

BUCKETS = 1 << 12  # of a histogram of magnitudes, few enough to stay in a core's cache
GROUP = 64  # entries that share a scale on the wire, and that are added together
TILE = 2048  # entries whose momentum is adapted together: all their arrays stay in a core's cache
LARGEST = np.finfo(np.float32).max


def compiled(function):
    """Compiles a function at its first call, to run without the GIL, and caches it on disk if possible."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no folder to write to
        return njit(nogil=True, error_model="numpy")(function)


@intrinsic
def trailing_zeros(_, word):
    """The number of zeros below the lowest set bit of a uint64 that is not zero."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@compiled
def key_of(number):
    """The bits of a float32 without its sign: an int32, ordered like the magnitude.

    Comparing these keys tells 0 from subnormal numbers even under torch.set_flush_denormal(True), where the processor
    treats them as 0. Otherwise every entry of a sparse vector would reach the least magnitude above 0.
    """
    return np.int32(np.float32(number).view(np.int32) & np.int32(0x7FFFFFFF))


@intrinsic
def _prefetch(_, array, index):
    """Prefetches the cache line of an element for writing."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, number = builder.gep(data, [arguments[1]]), ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], form), [
            pointer, number(1), number(3), number(1),
        ])  # fmt: skip
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@compiled
def send(e, x, layout, form, sample, fade, payloads):
    """Sends from a worker's or a server's end of a link."""
    places, values = add_and_select(e, x, layout, form.k, sample, fade)
    k = form.k
    integers = np.zeros(GROUP, np.int8)
    for shard in range(len(payloads)):
        payload, place, value = payloads[shard], places[shard, :k], values[shard, :k]
        for begin in range(0, k, GROUP):
            write_values(value[begin : begin + GROUP], begin, form, integers, payload)
        write_positions(place, form.low, payload[form.value_bytes : form.value_bytes + form.index_bytes])
        payload[form.value_bytes + form.index_bytes :] = 0
        words = payload.view(np.uint32)
        words[-1] = np.uint32(form.check - words.sum())
        np.negative(value, value)
    add_at(e, layout, places[:, :k], values[:, :k])


@compiled
def receive(payloads, layout, form, share, scale, parts):
    """Adds values, times ``share`` and ``scale``, to ``parts`` ``[parts, numel]``; returns whether all are finite."""
    (_, shards, _), finite = layout, True
    places, values = np.empty((shards, form.k), np.int32), np.empty((shards, form.k), np.float32)
    for row in range(len(payloads)):
        payload, shard, value = payloads[row], row % shards, values[row % shards]
        code = payload[form.value_bytes : form.value_bytes + form.index_bytes]
        read_positions(code, form.universe, form.low, places[shard])
        read_values(payload, form, value)
        for i in range(form.k):
            value[i] = value[i] * share * scale
            finite &= key_of(value[i]) < np.int32(0x7F800000)
        if shard == shards - 1:
            add_at(parts[row // shards % len(parts)], layout, places, values)
    return finite


@compiled
def add_and_select(e, x, layout, k, sample, fade):
    """The k largest magnitudes of every shard of ``fade e + x``: places and values, ``[shards, >= k]``.

    ``x`` may be empty: then ``e`` does not fade.

    A ``sample`` (by ``reference.sample_of`` and a seed) gives a threshold that slightly more than k entries of each
    shard should reach. If fewer do in some shard, the sum is scanned again without a threshold.
    """
    _, shards, _ = layout
    capacity = k + k // 4 + 2 * BLOCK
    places, values = np.empty((shards, capacity), np.int32), np.empty((shards, capacity), np.float32)
    counts, least = np.zeros(shards, np.int64), np.empty(shards, np.int32)
    least[:] = sampled_threshold(e, x, sample, fade)
    scan(e, x, layout, k, least, places, values, counts, fade)
    if (counts < k).any():
        least[:] = 0
        counts[:] = 0
        scan(e, x[:0], layout, k, least, places, values, counts, fade)
    for shard in range(shards):
        if counts[shard] > k:
            keep_largest(places[shard], values[shard], counts[shard], k, least[shard])
        for i in range(counts[shard], k):  # all elements of a smaller shard are selected: padding
            places[shard, i], values[shard, i] = i, 0
    return places, values


@compiled
def sampled_threshold(e, x, sample, fade):
    """The key of the magnitude at the sample's rank, but at least that of the smallest number above 0."""
    stride, rank, salt = sample
    sums = np.empty(len(e) // stride, np.float32)
    for i in range(len(sums)):
        turn = np.uint64(i + salt) * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)
        at = i * stride + np.int64(turn * np.uint64(stride) >> np.uint64(32))
        sums[i] = fade * e[at] + x[at] if len(x) else e[at]
    return max(kth_largest(sums, rank, 0)[0], 1) if rank <= len(sums) else 1


@compiled
def marked(words, w):
    """Packs 64 bytes of 0 or 1, the w-th eight of the words, into the bits of one word."""
    word = np.uint64(0)
    for i in range(8):
        octet = (words[8 * w + i] * np.uint64(0x0102040810204080)) >> np.uint64(56)
        word |= octet << np.uint64(8 * i)
    return word


@compiled
def scan(e, x, layout, k, least, places, values, counts, fade):
    """``e = fade e + x``, and clears ``x``, unless it is empty; appends entries whose key is at least ``least``."""
    marks = np.zeros(BLOCK, np.uint8)
    words = marks.view(np.uint64)
    numel, shards, block = layout
    block, capacity = min(block, BLOCK), places.shape[1]
    shard, turn = 0, 0
    for begin in range(0, numel, block):
        length = min(block, numel - begin)
        marks[length:] = 0
        place, value, n, threshold = places[shard], values[shard], counts[shard], least[shard]
        kept = e[begin : begin + length]
        if len(x):
            added = x[begin : begin + length]
            for i in range(length):
                a = min(max(fade * kept[i] + added[i], -LARGEST), LARGEST)  # the sum of two finite numbers may overflow
                kept[i] = a
                added[i] = np.float32(0)
                marks[i] = np.uint8(key_of(a) >= threshold)
        else:
            for i in range(length):
                marks[i] = np.uint8(key_of(kept[i]) >= threshold)
        for w in range((length + 63) // 64):
            word = marked(words, w)
            while word:
                i = 64 * w + np.int64(trailing_zeros(word))
                place[n], value[n] = turn + i, kept[i]
                n += 1
                word &= word - np.uint64(1)
        if n + block > capacity:  # more than expected: from now on, an entry must exceed the k-th largest so far
            n, least[shard] = k, keep_largest(place, value, n, k, least[shard]) + 1
        counts[shard] = n
        shard += 1
        if shard == shards:
            shard = 0
            turn += block


@compiled
def keep_largest(places, values, n, k, least):
    """Moves the k largest of n candidates to the front, in order; of equal ones, the first. Returns the least key."""
    cut, ties = kth_largest(values[:n], k, least)
    kept = 0
    for i in range(n):
        place, value, key = places[i], values[i], key_of(values[i])
        tie = (key == cut) & (ties > 0)
        places[kept], values[kept] = place, value
        kept += (key > cut) | tie
        ties -= tie
    return cut


@compiled
def kth_largest(values, k, least):
    """The key of the k-th largest magnitude, and how many entries of this magnitude are among the k largest.

    No key is below ``least`` - 1: :func:`scan` may have kept that one before it raised ``least``.

    Magnitudes are ordered like their bits. A histogram finds the bucket of the k-th largest, and the search goes on in
    that bucket alone.
    """
    keys, low, width = values.view(np.int32) & np.int32(0x7FFFFFFF), max(0, np.int64(least) - 1), 11
    counts = np.empty(BUCKETS, np.int64)
    while True:
        counts[:] = 0
        for key in keys:  # the last bucket also counts everything beyond
            counts[min((key - low) >> width, BUCKETS - 1)] += 1
        bucket = BUCKETS - 1
        while counts[bucket] < k:
            k -= counts[bucket]
            bucket -= 1
        beyond = bucket == BUCKETS - 1
        low += bucket << width
        if width == 0 and not beyond:
            return np.int32(low), k
        first, last = np.int32(low), np.int32(0x7FFFFFFF if beyond else low + (1 << width) - 1)
        inside = np.empty(counts[bucket], np.int32)
        n, most = 0, first
        for begin in range(0, len(keys), GROUP):
            group = keys[begin : begin + GROUP]
            found = np.int32(0)
            for i in range(len(group)):
                found = np.int32(found + ((group[i] >= first) & (group[i] <= last)))
            for i in range(len(group) if found else 0):
                if first <= group[i] <= last:
                    inside[n] = group[i]
                    most = max(most, group[i])
                    n += 1
        keys, width = inside, 0
        while (np.int64(most) - low) >> width >= BUCKETS - 1:
            width += 1


@compiled
def count_reaching(row, threshold):
    """Counts the entries whose magnitude reaches a threshold."""
    found = 0
    for begin in range(0, len(row), 1 << 20):
        part, here = row[begin : begin + (1 << 20)], np.int32(0)
        for i in range(len(part)):
            here += np.int32(abs(part[i]) >= threshold)
        found += here
    return found


@compiled
def bf16(number):
    """The bits of a finite float32, rounded to bfloat16, ties to even."""
    bits = np.float32(number).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@compiled
def write_values(values, begin, form, integers, payload):
    """Writes the group of values that starts at entry ``begin``, and replaces it by the decoded values."""
    n, largest = len(values), np.float32(form.largest)
    if form.bits == 32:
        floats = payload[4 * begin : 4 * (begin + n)].view(np.float32)
        for i in range(n):
            values[i] = min(max(values[i], -largest), largest)
            floats[i] = values[i]
    elif form.bits == 16:
        halves = payload[2 * begin : 2 * (begin + n)].view(np.uint16)
        for i in range(n):
            half = bf16(min(max(values[i], -largest), largest))
            halves[i] = np.uint16(half)
            values[i] = np.uint32(half << np.uint32(16)).view(np.float32)
    else:
        write_integers(values, begin, form, largest, integers, payload)


@compiled
def write_integers(values, begin, form, largest, integers, payload):
    """Writes a group as integers and a scale; see :class:`lightning_topk.core.wire.BlockWire`."""
    n, top = len(values), np.float32((1 << form.bits - 1) - 1)
    most = np.float32(0)
    for i in range(n):
        most = max(most, abs(values[i]))
    scale = bf16(min(most, largest) / top)
    unit = np.uint32(scale << np.uint32(16)).view(np.float32)
    integers[:] = 0
    if unit > 0:
        for i in range(n):
            integer = min(max(np.rint(min(max(values[i], -largest), largest) / unit), -top), top)
            integers[i] = np.int8(integer)
            values[i] = integer * unit
    else:
        values[:] = 0
    octets = integers.view(np.uint8)
    if form.bits == 8:
        payload[begin : begin + n] = octets[:n]
    else:
        for i in range((n + 1) // 2):
            payload[begin // 2 + i] = (octets[2 * i] & 15) | (octets[2 * i + 1] << 4)
    at = (form.k * form.bits + 7) // 8 + begin // GROUP * 2
    payload[at], payload[at + 1] = np.uint8(scale & np.uint32(255)), np.uint8(scale >> np.uint32(8))


@compiled
def read_values(payload, form, values):
    """Reads all values of a payload."""
    for begin in range(0, form.k, GROUP):
        group = values[begin : begin + GROUP]
        n = len(group)
        if form.bits == 32:
            group[:] = payload[4 * begin : 4 * (begin + n)].view(np.float32)
        elif form.bits == 16:
            halves = payload[2 * begin : 2 * (begin + n)].view(np.uint16)
            for i in range(n):
                group[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16)).view(np.float32)
        else:
            at = (form.k * form.bits + 7) // 8 + begin // GROUP * 2
            scale = (np.uint32(payload[at]) | np.uint32(payload[at + 1]) << np.uint32(8)) << np.uint32(16)
            unit = np.uint32(scale).view(np.float32)
            if form.bits == 8:
                for i in range(n):
                    group[i] = np.float32(np.int8(payload[begin + i])) * unit
            else:
                pairs = payload[begin // 2 : (begin + n + 1) // 2]
                for i in range(n // 2):
                    group[2 * i] = np.float32(np.int8(pairs[i] << 4) >> 4) * unit
                    group[2 * i + 1] = np.float32(np.int8(pairs[i]) >> 4) * unit
                if n % 2:
                    group[n - 1] = np.float32(np.int8(pairs[n // 2] << 4) >> 4) * unit


@compiled
def write_positions(places, low, code):
    """Writes ascending positions in the Elias-Fano code."""
    k, mask = len(places), (np.int64(1) << low) - 1
    low_bytes = (k * low + 7) // 8
    lows, highs = np.zeros(low_bytes // 8 + 2, np.uint64), np.zeros((len(code) - low_bytes) // 8 + 2, np.uint64)
    for i in range(k):
        place, at = np.int64(places[i]), i * low
        high = (place >> low) + i
        highs[high >> 6] |= np.uint64(1) << np.uint64(high & 63)
        part, shift = np.uint64(place & mask), np.uint64(at & 63)
        lows[at >> 6] |= part << shift
        lows[(at >> 6) + 1] |= (part >> np.uint64(1)) >> (np.uint64(63) - shift)
    code[:low_bytes] = lows.view(np.uint8)[:low_bytes]
    code[low_bytes:] = highs.view(np.uint8)[: len(code) - low_bytes]


@compiled
def read_positions(code, universe, low, places):
    """Reads positions; refuses a code with more or fewer of them than ``places``."""
    k, mask = len(places), (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    low_bytes = (k * low + 7) // 8
    lows, highs = np.zeros(low_bytes // 8 + 2, np.uint64), np.zeros((len(code) - low_bytes) // 8 + 1, np.uint64)
    lows.view(np.uint8)[:low_bytes] = code[:low_bytes]
    highs.view(np.uint8)[: len(code) - low_bytes] = code[low_bytes:]
    n, at = 0, 0
    for w in range(len(highs)):
        word = highs[w]
        while word:
            if n < k:
                high = 64 * w + np.int64(trailing_zeros(word)) - n
                shift = np.uint64(at & 63)
                bits = lows[at >> 6] >> shift | (lows[(at >> 6) + 1] << np.uint64(1)) << (np.uint64(63) - shift)
                places[n] = min((high << low) | np.int64(bits & mask), universe - 1)
                at += low
            n += 1
            word &= word - np.uint64(1)
    if n != k:
        raise ValueError("a payload holds too many positions, or too few: it was damaged.")


@compiled
def add_at(out, layout, places, values):
    """Adds values ``[shards, k]`` at ascending places in each shard; the padding, of value 0, to the last element.

    Shards take turns, so that pages are written in order; a group is written while the cache lines of the next one are
    prefetched.
    """
    numel, shards, block = layout
    skip, k = block * (shards - 1), places.shape[1]
    flats = np.empty((2, shards, GROUP), np.int64)
    edges, aheads = np.empty(shards, np.int64), np.empty(shards, np.int64)
    for shard in range(shards):
        edges[shard], aheads[shard] = block, shard * block
    for begin in range(0, k + GROUP, GROUP):
        turn = begin // GROUP % 2
        for shard in range(shards):
            place, flat, edge, ahead = places[shard], flats[turn, shard], edges[shard], aheads[shard]
            for i in range(min(GROUP, k - begin)):
                at = np.int64(place[begin + i])
                while at >= edge:  # in a later block
                    edge += block
                    ahead += skip
                flat[i] = min(at + ahead, numel - 1)
                _prefetch(out, flat[i])
            edges[shard], aheads[shard] = edge, ahead
        if begin:
            for shard in range(shards):
                group, flat = values[shard, begin - GROUP : min(begin, k)], flats[1 - turn, shard]
                for i in range(len(group)):
                    out[flat[i]] += group[i]


@intrinsic
def _bytes_at(_, address):
    """A pointer to uint8 at an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.int64), generate


@compiled
def _floats(address, numel):
    """The float32 ``[numel]`` at an address."""
    return carray(_bytes_at(address), 4 * numel).view(np.float32)


@compiled
def catch_up(table, rules, scale, taken):
    """See ``reference.catch_up_`` and ``reference.AddressTable``; ``taken`` is false if the step is skipped.

    Most entries are not delivered. The work for all of them is vectorised, tile by tile; a second loop visits the
    delivered ones.
    """
    # m^d, 1 + ... + m^(d-1), and the share of a gradient in its replacement, for d steps waited
    faded, reach, share = np.empty(255), np.empty(255), np.empty(255)
    places = np.empty(255, np.int64)  # of the range of d + 1
    for d in range(255):
        places[d] = np.int64(np.log2(d + 1))
    marks = np.zeros(TILE, np.uint8)
    words = marks.view(np.uint64)
    known = -1
    for row in table:
        numel, replaces, compares = row[8], row[5] != 0, row[6] != 0
        b, waited = _floats(row[0], numel), carray(_bytes_at(row[1]), numel)
        g, out = _floats(row[2], numel), _floats(row[3], numel)
        x, replacement = _floats(row[4], numel), _floats(row[5], numel)
        ratio, counts = _floats(row[6], 8), carray(_bytes_at(row[7]), 64).view(np.int32)
        momentum, weight, sign, decay, steady, waits, squares, eps = rules[row[9]]
        if row[9] != known:
            known, kept = row[9], squares  # n^(d+1)
            faded[0], reach[0], share[0] = 1, 0, 1
            for d in range(1, 255):
                faded[d], reach[d] = faded[d - 1] * momentum, reach[d - 1] + faded[d - 1]
                kept *= squares
                share[d] = 1 if squares == 1 else np.sqrt((1 - kept) / ((d + 1) * (1 - squares)))
        for begin in range(0, numel, TILE):
            size = min(TILE, numel - begin)
            tile = slice(begin, begin + size)
            g_, b_, x_ = g[tile], b[tile], x[tile]
            out_, waited_, replacement_ = out[tile], waited[tile], replacement[tile]
            if steady != 0:
                for i in range(size):
                    out_[i] = steady * x_[i]
            else:
                out_[:] = 0
            if replaces:
                replacement_[:] = 0
            if not taken:
                continue
            marks[size:] = 0
            for i in range(size):
                marks[i] = np.uint8(g_[i] != 0)
            for w in range(TILE // 64):
                word = marked(words, w)
                while word:
                    i = 64 * w + np.int64(trailing_zeros(word))
                    d = np.int64(waited_[i])
                    gradient = sign * g_[i] / scale
                    if decay != 0 and (waits or d == 0):
                        gradient += decay * (d + 1) * x_[i]
                    v = momentum * b_[i] + weight * gradient
                    moved = b_[i] + reach[d] * v
                    more = 1.0
                    if compares and d > 0 and b_[i] != 0:
                        same = (gradient > 0) == (b_[i] > 0)
                        counts[2 * places[d] + same] += 1
                        r = ratio[places[d]]
                        if same and r > 0:
                            typical = abs(gradient) / np.sqrt(d + 1)
                            more = (typical + eps) / (typical * np.sqrt((1 + r / (d + 1)) / (1 + r)) + eps)
                    if replaces:
                        moved = more * moved + weight / momentum * (more - share[d]) * gradient
                        replacement_[i] = sign * gradient * share[d] * scale
                    if steady != 0 and d > 0:
                        moved += steady * x_[i]
                    out_[i] = moved
                    b_[i] = faded[d] * v
                    waited_[i] = 255
                    word &= word - np.uint64(1)
            for i in range(size):  # counts the step: 254 stays, and 255 becomes 0
                waited_[i] = min(waited_[i], 253) + 1 if waited_[i] != 255 else 0
