// The functions that Python calls (native.py, native_recurrence.py, packed.py, models/whole_step.py), with C names and
// plain structs. Numbers are bfloat16 or float.
//
// This file is compiled once for each instruction set, each time into another library. So code for a
// set that the processor lacks is never loaded.

#include "decode.h"
#include "gated_delta.h"
#include "index_scores.h"
#include "mamba1.h"
#include "mamba2.h"
#include "pack.h"
#include "rg_lru.h"
#include "short_conv.h"

namespace {

// Value of the argument `numbers` for float; any other value means bfloat16.
constexpr int64_t IS_FLOAT = 0;

// Calls `body` with a zero of the number type.
template <class Body> void in_numbers(int64_t numbers, Body &&body) {
    if (numbers == IS_FLOAT) body(float{});
    else body(bf16{});
}

// Calls `body` with a zero of the number type, and one of the type in which the cache stores numbers.
template <class Body> void in_stored_numbers(int64_t numbers, int64_t stored_as, Body &&body) {
    in_numbers(numbers, [&](auto zero) {
        in_stored<decltype(zero)>(stored_as, [&](auto stored) { body(zero, stored); });
    });
}

} // namespace

extern "C" {

#define EXPORT __attribute__((visibility("default")))

// Increase this when a signature or struct changes: Python uses only libraries with its own version.
EXPORT int64_t kernels_version() { return 33; }

// Returns the digest of the source that the library was compiled from (setup.py); 0 if it is not known.
#if !defined(SOURCE_DIGEST)
#define SOURCE_DIGEST 0
#endif
EXPORT int64_t source_digest() { return SOURCE_DIGEST; }

// Returns how results in a number type differ from those of other instruction sets: 0 if they do not.
EXPORT int64_t bits_of_set(int64_t numbers, int64_t rounds_inputs) {
    enum { COMMON, OF_PAIRS, NOT_FUSED };
    if (numbers != IS_FLOAT && HAS_PAIRS) return OF_PAIRS; // attention multiplies pairs of bfloat16, too
    return HAS_FMA || rounds_inputs ? COMMON : NOT_FUSED;  // ByQuickFloats
}

// Sets the entry point GOMP_parallel of the OpenMP runtime that torch has loaded.
EXPORT void set_runtime(void *parallel) { runtime() = (Parallel)parallel; }

// Adds the nanoseconds of the parts of later calls to times [5], in the order of StepPart (team.h). Null: does not
// measure them.
EXPORT void time_parts(int64_t *times) { part_times() = times; }

// Adds delta, if it is not null, to x [rows, size], and writes the norm of x times weight [size] to out.
EXPORT void add_norm(int64_t numbers, int64_t threads, int64_t rows, int64_t size, void *x,
                     const void *delta, const void *weight, void *out, double eps) {
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        together(threads, 1, [&](Team &team) {
            team.share(OTHER_LAYERS, rows, [&](int64_t t) {
                N *row = (N *)x + t * size;
                if (delta) add_row(row, (const N *)delta + t * size, size);
                rms_row(row, (const N *)weight, (N *)out + t * size, size, (float)eps);
            });
        });
    });
}

// Writes the activation of each row to out [rows, inner]. from: [rows, 2 inner], the gate and then up; without a gate,
// [rows, inner].
EXPORT void activate(int64_t numbers, int64_t threads, int64_t rows, int64_t inner, const Activation *activation,
                     const void *from, void *out) {
    const int64_t width = activation->is_gated ? 2 * inner : inner;
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        together(threads, 1, [&](Team &team) {
            team.share(OTHER_LAYERS, rows, [&](int64_t t) {
                activate_row(*activation, (const N *)from + t * width, (N *)out + t * inner, inner);
            });
        });
    });
}

// Adds the terms of a step's adapters to the result y [tokens, outputs] of one linear of a layer, whose input was
// x [tokens, inputs].
EXPORT void add_low_rank(int64_t numbers, int64_t threads, const StepAdapters *adapters, int64_t tokens, int64_t layers,
                         int64_t layer, int64_t linear, const void *x, int64_t inputs, void *y, int64_t outputs) {
    const std::vector<int64_t> adapted = adapters->adapted_tokens(tokens);
    if (adapted.empty()) return;
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        const LowRank<N> terms{*adapters, adapted, layers, layer, (AdaptedLinear)linear};
        together(threads, 2, [&](Team &team) {
            team.share(OTHER_LAYERS, terms.shrink_items(), [&](int64_t item) { terms.shrink(item, (const N *)x, inputs); });
            team.share(OTHER_LAYERS, terms.expand_items(outputs),
                       [&](int64_t item) { terms.expand(item, (N *)y, outputs, 1.0f); });
        });
    });
}

// Writes the sigmoid of each number of x [rows, width] to out [rows, width]. `stride` numbers from row to row of x.
EXPORT void sigmoids(int64_t numbers, int64_t threads, int64_t rows, int64_t width, const void *x, int64_t stride,
                     void *out) {
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        together(threads, 1, [&](Team &team) {
            team.share(OTHER_LAYERS, rows, [&](int64_t t) {
                const N *from = (const N *)x + t * stride;
                N *to = (N *)out + t * width;
                for (int64_t i = 0; i < width; i += LANES)
                    store_first(to + i, sigmoid(load_first(from + i, width - i)), width - i);
            });
        });
    });
}

// Makes each number x of logits [rows, width] cap * tanh(x / cap).
EXPORT void cap_logits(int64_t threads, int64_t rows, int64_t width, float *logits, double cap) {
    together(threads, 1, [&](Team &team) {
        team.share(HEAD, rows, [&](int64_t t) { cap_row(logits + t * width, width, (float)cap); });
    });
}

// Computes what a gated delta net does between its linears, changes the states and saves them, and returns -1.
// If the states contradict `tokens` or each other, computes nothing and returns the number of a row that does.
//
// inputs: [T, C + H * V], with `stride` numbers from token to token. gates: [T, H + H * decays]. out: [T, H, V].
EXPORT int64_t gated_delta(int64_t threads, const DeltaSizes *sizes, const DeltaWeights *weights, const States *states,
                           int64_t tokens, const float *inputs, int64_t stride, const float *gates, float *out) {
    const int64_t bad_row = states->bad_row(tokens);
    if (bad_row >= 0) return bad_row;
    const Vectors vectors = sizes->vectors();
    const Convolution convolution{sizes->kernel, vectors.width(), weights->conv, nullptr};
    const MixedMemory mixed(vectors, tokens);
    std::vector<float> betas((size_t)(sizes->value_heads * tokens)), decays(betas.size() * (size_t)sizes->decays);
    const Delta delta{*sizes, *states, *weights,     convolution,   mixed.mixed, inputs,
                      stride, gates,   betas.data(), decays.data(), out};
    together(threads, 3, [&](Team &team) { compute_delta(team, delta); });
    return -1;
}

// Computes the convolution of a Mamba-1 layer and its SiLU, changes the tails in the states and saves them, and returns
// as `gated_delta` does.
//
// taps: [kernel, C]. bias: [C], or null. inputs: [T, C], with `stride` numbers from token to token. out: [T, C].
EXPORT int64_t mamba1_conv(int64_t threads, int64_t kernel, int64_t width, const States *states, int64_t tokens,
                           const float *taps, const float *bias, const float *inputs, int64_t stride, float *out) {
    const int64_t bad_row = states->bad_row(tokens);
    if (bad_row >= 0) return bad_row;
    const ConvolutionStep step{*states, Convolution{kernel, width, taps, bias}, inputs, stride, out};
    together(threads, 1, [&](Team &team) { compute_convolution<Silu>(team, step); });
    return -1;
}

// Computes the recurrence of a Mamba-1 layer and its gate, changes the matrices in the states and saves them, and
// returns as `gated_delta` does. `states` begin with the matrix [channels, state]. out: [T, channels].
EXPORT int64_t mamba1_scan(int64_t threads, int64_t channels, int64_t state, const States *states, int64_t tokens,
                           const ScanWeights *weights, const ScanInputs *inputs, float *out) {
    const int64_t bad_row = states->bad_row(tokens);
    if (bad_row >= 0) return bad_row;
    const Mamba1Scan scan{channels, state, *states, *weights, *inputs, out};
    together(threads, 1, [&](Team &team) { compute_mamba1_scan(team, scan); });
    return -1;
}

// Computes what a Mamba-2 layer does between its linears, changes the states and saves them, and returns as
// `gated_delta` does.
//
// inputs: [T, H * P + C + H], with `stride` numbers from token to token. out: [T, H * P].
EXPORT int64_t mamba2(int64_t threads, const Mamba2Sizes *sizes, const Mamba2Weights *weights, const States *states,
                      int64_t tokens, const float *inputs, int64_t stride, float *out) {
    const int64_t bad_row = states->bad_row(tokens);
    if (bad_row >= 0) return bad_row;
    const Vectors vectors = sizes->vectors();
    const Convolution convolution{sizes->kernel, vectors.width(), weights->conv, weights->conv_bias};
    const MixedMemory mixed(vectors, tokens);
    std::vector<float> steps((size_t)(sizes->heads * tokens)), factors(steps.size());
    const Mamba2 mamba{*sizes, *states,      *weights,       convolution, mixed.mixed, inputs,
                       stride, steps.data(), factors.data(), out};
    together(threads, 3, [&](Team &team) { compute_mamba2(team, mamba); });
    return -1;
}

// Computes the convolution of an RG-LRU layer. Arguments and result are those of `mamba1_conv`.
EXPORT int64_t rg_lru_conv(int64_t threads, int64_t kernel, int64_t width, const States *states, int64_t tokens,
                           const float *taps, const float *bias, const float *inputs, int64_t stride, float *out) {
    const int64_t bad_row = states->bad_row(tokens);
    if (bad_row >= 0) return bad_row;
    const ConvolutionStep step{*states, Convolution{kernel, width, taps, bias}, inputs, stride, out};
    together(threads, 1, [&](Team &team) { compute_convolution<Identity>(team, step); });
    return -1;
}

// Computes the recurrence of an RG-LRU layer and its gate, changes the states and saves them, and returns as
// `gated_delta` does. `states` begin with the numbers of the recurrence [heads * dim]. out: [T, heads * dim].
EXPORT int64_t rg_lru_scan(int64_t threads, int64_t heads, int64_t dim, int64_t activation, const States *states,
                           int64_t tokens, const LruWeights *weights, const LruInputs *inputs, float *out) {
    const int64_t bad_row = states->bad_row(tokens);
    if (bad_row >= 0) return bad_row;
    const RgLru lru{heads, dim, tokens, activation, *states, *weights, *inputs, out};
    together(threads, 1, [&](Team &team) { compute_rg_lru(team, lru); });
    return -1;
}

// Computes a short convolution between its two gates, changes the states and saves them, and returns as `gated_delta`
// does.
//
// taps: [kernel, C]. bias: [C], or null. inputs: [T, 3 C], with `stride` numbers from token to token. out: [T, C].
EXPORT int64_t short_conv(int64_t threads, int64_t kernel, int64_t width, const States *states, int64_t tokens,
                          const float *taps, const float *bias, const float *inputs, int64_t stride, float *out) {
    const int64_t bad_row = states->bad_row(tokens);
    if (bad_row >= 0) return bad_row;
    const ShortConv conv{*states, Convolution{kernel, width, taps, bias}, inputs, stride, out};
    together(threads, 1, [&](Team &team) { compute_short_conv(team, conv); });
    return -1;
}

// Rotates queries and keys in place, and writes keys and values to one layer's cache.
//
// qkv: [rows, (H + 2 H_kv) D]. slots: index of each row in the cache. stored_as: how the cache stores
// keys and values (StoredAs).
EXPORT void place_kv(int64_t numbers, int64_t stored_as, int64_t threads, int64_t rows, const Heads *heads,
                     void *qkv, const void *cos, const void *sin, const int64_t *slots, void *k_cache,
                     void *v_cache, int64_t block_tokens, int64_t block_items) {
    in_stored_numbers(numbers, stored_as, [&](auto zero, auto stored) {
        using N = decltype(zero);
        using S = decltype(stored);
        const Heads h = *heads;
        together(threads, 1, [&](Team &team) {
            team.share(ATTENTION, rows, [&](int64_t t) {
                const int64_t block = slots[t] / block_tokens, offset = slots[t] % block_tokens;
                const N *c = (const N *)cos + t * h.dim, *s = (const N *)sin + t * h.dim;
                N *row = (N *)qkv + t * (h.heads + 2 * h.kv_heads) * h.dim;
                rotate_row(row, c, s, h, h.dim);
                cache_row<S>(row, k_cache, v_cache, block * block_items + offset * token_items<S>(h), h);
            });
        });
    });
}

// Writes the attention output of one layer to out [T, H, D]. q_stride: numbers from token to token of q.
// stored_as: how the cache stores keys and values (StoredAs).
EXPORT void paged_attention(int64_t numbers, int64_t stored_as, int64_t threads, const Heads *heads,
                            const Rows *rows, const void *q, int64_t q_stride, const void *k_cache,
                            const void *v_cache, int64_t block_items, void *out, const Scoring *scoring) {
    in_stored_numbers(numbers, stored_as, [&](auto zero, auto stored) {
        using N = decltype(zero);
        using S = decltype(stored);
        const Work work(*rows);
        std::vector<float> partials((size_t)(work.num_partials * heads->kv_heads * group_floats(*heads)));
        const Attend<N, S> a{(const N *)q, (N *)out, (const S *)k_cache, (const S *)v_cache,
                             block_items, q_stride, *heads, *scoring};
        together(threads, 2, [&](Team &team) { attend(team, a, *rows, work, partials.data()); });
    });
}

// Writes the scores of an indexer to out [n, width]; -inf for tokens that are not seen. stored_as: how the cache stores
// keys (StoredAs).
EXPORT void index_scores(int64_t numbers, int64_t stored_as, int64_t threads, const IndexedTokens *tokens,
                         const void *queries, const float *weights, const void *keys, float *out) {
    in_stored_numbers(numbers, stored_as, [&](auto zero, auto stored) {
        using N = decltype(zero);
        using S = decltype(stored);
        const IndexScores<N, S> s{(const N *)queries, weights, (const S *)keys, out};
        together(threads, 1, [&](Team &team) { compute_scores(team, s, *tokens); });
    });
}

// Computes y [rows, outputs] of x [rows, inputs]. y is float, whatever the number type of x.
EXPORT void linear_to_float(int64_t numbers, int64_t threads, const void *x, int64_t rows,
                            const Packed *weight, float *y) {
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        const Linear<N, float> l{(const N *)x, *weight, nullptr, y, rows, STORE};
        together(threads, 1, [&](Team &team) { linear(team, l); });
    });
}

// Computes y [rows, outputs] of x [rows, inputs], in the number type of x.
EXPORT void linear_same(int64_t numbers, int64_t threads, const void *x, int64_t rows,
                        const Packed *weight, const void *bias, void *y) {
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        const Linear<N, N> l{(const N *)x, *weight, (const N *)bias, (N *)y, rows, STORE};
        together(threads, 1, [&](Team &team) { linear(team, l); });
    });
}

// Computes y [heads, rows, outputs] of x [heads, rows, inputs], each part with the matrix of its head, in the number
// type of x. The matrices have equal sizes.
EXPORT void linear_heads(int64_t numbers, int64_t threads, int64_t heads, const void *x, int64_t rows,
                         const Packed *weights, void *y) {
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        together(threads, 1, [&](Team &team) {
            linears(team, heads, [&](int64_t i) {
                const Packed &weight = weights[i];
                const N *part = (const N *)x + i * rows * weight.inputs;
                return Linear<N, N>{part, weight, nullptr, (N *)y + i * rows * weight.outputs, rows, STORE};
            });
        });
    });
}

// Computes the forward pass of a step (forward.h).
EXPORT void forward(int64_t numbers, int64_t threads, const Forward *step) {
    in_numbers(numbers, [&](auto zero) {
        Pass<decltype(zero)> pass(*step);
        together(threads, pass.num_phases(), [&](Team &team) { pass.run(team); });
    });
}

// Computes the logits y [rows, outputs] of x [rows, hidden], the output of `forward`.
//
// normed: scratch memory [rows, hidden].
EXPORT void logits(int64_t numbers, int64_t threads, const Head *head, const float *x, int64_t rows,
                   void *normed, float *y) {
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        RoundedRows &rounded = Pass<N>::rounded_rows();
        if (reads_rounded(head->weight)) rounded.fit(rows, head->weight.inputs);
        together(threads, 3, [&](Team &team) { compute_logits(team, *head, x, rows, (N *)normed, y, rounded); });
    });
}

// Computes a decode step (decode.h), and returns -1. If a row's token is not in the vocabulary, computes
// nothing and returns the first such row.
EXPORT int64_t decode(int64_t numbers, int64_t threads, const Decode *step) {
    const DecodeRows decode_rows(*step);
    if (decode_rows.bad_row >= 0) return decode_rows.bad_row;
    in_numbers(numbers, [&](auto zero) { decode_as<decltype(zero)>(*step, decode_rows, threads); });
    return -1;
}

// Chooses a token for each place: row p of logits [places, vocab] is of slot slots[p], and its token gets position
// known[p]. changes: whether bias and penalties are applied. Writes tokens [places] and finite [places] (ChosenToken).
// The logits are changed and restored.
EXPORT void sample(int64_t threads, const Sampler *sampler, int64_t places, int64_t vocab, float *logits,
                   const int64_t *slots, const int64_t *known, int64_t changes, int64_t *tokens, uint8_t *finite) {
    together(threads, 1, [&](Team &team) {
        team.share(SAMPLING, places, [&](int64_t p) {
            const ChosenToken chosen = choose_token(*sampler, slots[p], known[p], logits + p * vocab, vocab, changes);
            tokens[p] = chosen.token;
            finite[p] = chosen.finite;
        });
    });
}

// Returns the bytes of a part of a packed matrix.
EXPORT int64_t packed_bytes(int64_t format, int64_t outputs, int64_t inputs) {
    return panels_of(outputs) * panel_bytes(format, inputs / GROUP);
}

// Packs GGUF blocks of kind `kind` (pack.h), given row after row. `to` must be zeroed before.
EXPORT void pack_blocks(int64_t threads, int64_t kind, const uint8_t *blocks, int64_t outputs,
                        int64_t inputs, uint8_t *to) {
    const int64_t groups = inputs / GROUP, size = panel_bytes(PACKED_AS[kind], groups);
    const int64_t row_bytes = groups / groups_of(kind) * BLOCK_BYTES[kind];
    together(threads, 1, [&](Team &team) {
        team.share(OTHER_LAYERS, panels_of(outputs), [&](int64_t panel) {
            for (int64_t o = panel * PANEL; o < outputs && o < (panel + 1) * PANEL; o++)
                pack_row(kind, blocks + o * row_bytes, groups, to + panel * size, o % PANEL);
        });
    });
}

// Writes `count` rows of a matrix to `to` [count, inputs], in the number type `numbers`.
EXPORT void gather_rows(int64_t numbers, int64_t threads, const Packed *matrix, const int64_t *rows,
                        int64_t count, void *to) {
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        together(threads, 1, [&](Team &team) {
            team.share(OTHER_LAYERS, count, [&](int64_t i) { gather_row(*matrix, rows[i], (N *)to + i * matrix->inputs); });
        });
    });
}

// Packs values [outputs, inputs] in their own number type. `to` must be zeroed before.
EXPORT void pack_dense(int64_t numbers, int64_t threads, const void *values, int64_t outputs,
                       int64_t inputs, uint8_t *to) {
    in_numbers(numbers, [&](auto zero) {
        using N = decltype(zero);
        const int64_t groups = inputs / GROUP, size = group_bytes(numbers == IS_FLOAT ? F32 : BF16);
        together(threads, 1, [&](Team &team) {
            team.share(OTHER_LAYERS, panels_of(outputs), [&](int64_t panel) {
                for (int64_t o = panel * PANEL; o < outputs && o < (panel + 1) * PANEL; o++)
                    for (int64_t g = 0; g < groups; g++)
                        pack_values((const N *)values + o * inputs + g * GROUP,
                                    to + (panel * groups + g) * size, o % PANEL);
            });
        });
    });
}

} // extern "C"
