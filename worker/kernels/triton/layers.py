"""Device code of the operations between linear layers. kernels/gpu.py launches it.

Numbers are loaded in the dtype of their tensors and computed with in float32. They are rounded to
that dtype where the torch kernels round them (kernels/reference.py), so that both give the same
results. An argument that is None costs nothing: Triton then compiles the kernel without it.

Legend: T tokens in the step, D head dim, I intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounded(values, like):
    """Return float32 `values` as they are after rounding to the dtype of the pointer `like`."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def cos_sin(positions, inv_freq, factor, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Write the cos and sin of one token's angles, as `rotation` of layers/rope.py returns them.

    positions   [T] int64
    inv_freq    [HALF] float32
    cos, sin    [T, 2 HALF]
    """
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    is_pair = pair < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + pair, is_pair, 0.0)
    c, s = tl.cos(angle) * factor, tl.sin(angle) * factor
    to = token * (2 * HALF) + pair
    tl.store(cos + to, c, is_pair)
    tl.store(cos + to + HALF, c, is_pair)
    tl.store(sin + to, -s, is_pair)
    tl.store(sin + to + HALF, s, is_pair)


@triton.jit
def _rms_norm(values, weight, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the RMS norm of `values` [BLOCK], of which all but SIZE are 0, times weight [SIZE]."""
    column = tl.arange(0, BLOCK)
    factors = tl.load(weight + column, column < SIZE, 0.0).to(tl.float32)
    return values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps) * factors


@triton.jit
def add_norm(
    x,
    delta,
    post_weight,
    weight,
    out,
    x_stride,
    delta_stride,
    out_stride,
    post_eps,
    scale,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a row of delta to x, after its norm and times `scale`. Write the norm of x to `out`.

    x, delta, out         [T, SIZE], with a stride between rows. delta may be None. `out` may be x
    post_weight, weight   [SIZE]; None: there is no such norm
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    x += row * x_stride + column
    total = tl.load(x, is_column, 0.0).to(tl.float32)
    if delta is not None:
        added = tl.load(delta + row * delta_stride + column, is_column, 0.0).to(tl.float32)
        if post_weight is not None:
            added = _rounded(_rms_norm(added, post_weight, post_eps, SIZE, BLOCK), x)
        total = _rounded(total + _rounded(added * scale, x), x)
        tl.store(x, total, is_column)
    if weight is not None:
        normed = _rms_norm(total, weight, eps, SIZE, BLOCK)
        tl.store(out + row * out_stride + column, normed, is_column)


@triton.jit
def _head_norm(items, inverse, weight, item, is_item, like):
    """Return items of heads, times `inverse` of their head and times weight [D], rounded."""
    factors = tl.load(weight + item, is_item, 0.0).to(tl.float32)
    return _rounded(items * inverse * factors, like)


@triton.jit
def _place_heads(
    source,
    target,
    is_head,
    weight,
    eps,
    cos,
    sin,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Write the heads at pointers `source` [heads, 1], normalised and rotated, to `target`.

    weight     [D]; None: no norm
    cos, sin   [2 HALF], of this token

    A head has three parts: the first items of its pairs, the second ones, and the rest, which is
    not rotated. So both items of a pair are in one thread, in pieces of 16 bytes.
    """
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pair < HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    is_rest = rest < D
    HAS_REST: tl.constexpr = 2 * HALF < D
    if HALF > 0:
        first = tl.load(source + pair, is_head & is_pair, 0.0).to(tl.float32)
        second = tl.load(source + HALF + pair, is_head & is_pair, 0.0).to(tl.float32)
        # The first half of sin is the second half, negated.
        c = tl.load(cos + HALF + pair, is_pair, 0.0).to(tl.float32)
        s = tl.load(sin + HALF + pair, is_pair, 0.0).to(tl.float32)
    if HAS_REST:
        others = tl.load(source + rest, is_head & is_rest, 0.0).to(tl.float32)
    if weight is not None:
        squares = 0.0
        if HALF > 0:
            squares += tl.sum(first * first + second * second, 1, keep_dims=True)
        if HAS_REST:
            squares += tl.sum(others * others, 1, keep_dims=True)
        inverse = tl.rsqrt(squares / D + eps)
        if HALF > 0:
            first = _head_norm(first, inverse, weight, pair, is_pair, source)
            second = _head_norm(second, inverse, weight, HALF + pair, is_pair, source)
        if HAS_REST:
            others = _head_norm(others, inverse, weight, rest, is_rest, source)
    # Several threads may load the same items of a small part, and `target` may be `source`.
    tl.debug_barrier()
    if HALF > 0:
        tl.store(target + pair, _rounded(first * c, source) - second * s, is_head & is_pair)
        tl.store(target + HALF + pair, _rounded(second * c, source) + first * s, is_head & is_pair)
    if HAS_REST:
        tl.store(target + rest, others, is_head & is_rest)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def place(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    k_cache,
    v_cache,
    slot_mapping,
    qkv_stride,
    q_eps,
    k_eps,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Normalise and rotate some query heads of one token in place, or write some keys, likewise
    normalised and rotated, and their values to the cache.

    qkv                  [T, (H + 2 H_KV) * D], with a stride between rows
    cos, sin             [T, 2 HALF]: items i and HALF + i of a head are a pair. HALF is 0 if heads
                         are not rotated
    q_weight, k_weight   [D]; None: no norm
    k_cache, v_cache     [slots, H_KV, D]
    slot_mapping         [T] int64; a negative entry is padding, for which nothing is cached
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    qkv += token * qkv_stride
    if HALF > 0:
        cos += token * (2 * HALF)
        sin += token * (2 * HALF)
    Q_BLOCKS: tl.constexpr = (H + BLOCK_HEADS - 1) // BLOCK_HEADS
    if block < Q_BLOCKS:
        head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        q = qkv + head * D
        _place_heads(q, q, head < H, q_weight, q_eps, cos, sin, D, HALF, BLOCK_HALF, BLOCK_REST)
    elif slot >= 0:
        head = ((block - Q_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        is_head = head < H_KV
        k = qkv + H * D + head * D
        to = slot * (H_KV * D) + head * D
        item = tl.arange(0, BLOCK_D)[None, :]
        v = tl.load(k + H_KV * D + item, is_head & (item < D))
        _place_heads(
            k, k_cache + to, is_head, k_weight, k_eps, cos, sin, D, HALF, BLOCK_HALF, BLOCK_REST
        )
        tl.store(v_cache + to + item, v, is_head & (item < D))


@triton.jit
def _activation(x, ACTIVATION: tl.constexpr):
    """Return silu, gelu, gelu_tanh or relu2 of x."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # The tanh of u is 2 / (1 + e^(-2 u)) - 1, and u is sqrt(2 / pi) * (x + 0.044715 x^3).
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def activate(
    inner,
    out,
    inner_stride,
    alpha,
    limit,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the activation of BLOCK columns of one row of an MLP.

    inner          [T, 2 SIZE], gate and up, with a stride between rows; [T, SIZE] without a gate
    out            [T, SIZE]
    alpha, limit   of "clamped_swiglu"
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < SIZE
    inner += row * inner_stride + column
    gate = tl.load(inner, is_column, 0.0).to(tl.float32)
    if not IS_GATED:
        result = _activation(gate, ACTIVATION)
    else:
        up = tl.load(inner + SIZE, is_column, 0.0).to(tl.float32)
        if ACTIVATION == "clamped_swiglu":
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
            result = gate / (1.0 + tl.exp(-alpha * gate)) * up
        else:
            result = _rounded(_activation(gate, ACTIVATION), out) * up
    tl.store(out + row * SIZE + column, result, is_column)
