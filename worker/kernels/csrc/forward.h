// The forward pass of a decoder, from token ids to the output of the last layer, in one call that wakes
// the threads once.
//
// The code follows models/decoder.py line by line, with packed weights. One thing differs: x, to which
// every layer adds, is float, because some of its numbers are so large that bfloat16 would lose what is
// added. Norms, orders and activations are chosen once for each row or layer, outside of the inner loops.
//
// Legend: T tokens, H query heads, H_kv key/value heads, D head dim, I intermediate size of a layer's MLP
// or experts, E experts, K experts chosen for each token (1 without a mixture).
#pragma once

#include "activation.h"
#include "key_runs.h"
#include "linear.h"
#include "low_rank.h"
#include "prefill.h"
#include "routing.h"

namespace {

// A rotary embedding of some layers.
struct Rope {
    const float *inv_freq; // [width / 2]: radians by which a pair rotates per position
    int64_t width;         // items of each head that are rotated
    double factor;         // of cos and sin
    const int64_t *axes;   // [width / 2]: the axis of the positions that turns a pair; null: the first
};

// Rows of images, which stand in place of the embeddings of some tokens. Some are added after the first layers, too.
struct ImageRows {
    const int64_t *index;     // [T]: the row of each token, or -1; null: no token has one
    const float *rows;        // [K, hidden]
    const float *added;       // [num_added, K, hidden]: what the first layers add to x at the end
    int64_t count, num_added; // count: K

    INLINE const float *row(int64_t t, int64_t hidden) const {
        return index && index[t] >= 0 ? rows + index[t] * hidden : nullptr;
    }
    INLINE bool are_added(int64_t layer) const { return index && layer < num_added; }
};

// Weights of an MLP, or of one expert.
struct Mlp {
    Packed gate_up, down;
    const void *gate_up_bias, *down_bias; // [outputs], or null
};

// Weights and cache of one layer.
struct Layer {
    Norm attention_norm, post_attention_norm, mlp_norm, post_mlp_norm; // [hidden]
    Norm q_norm, k_norm;                                               // [q_norm_width], [k_norm_width]
    Packed qkv, output, router;                           // the router only of a mixture: E outputs
    const void *qkv_bias, *output_bias, *router_bias;     // [outputs], or null
    const Mlp *mlps;                                      // [E], or one
    void *k_cache, *v_cache; // of this layer: [B, block_tokens, H_kv, stored_width] (stored_kv.h)
    Scoring scoring;
    Activation activation;
    int64_t q_norm_width, k_norm_width; // D, or all heads together
    int64_t norms_rotated; // whether the norms of queries and keys read them after their rotation
    int64_t rope;         // index of the rotary embedding; -1: queries and keys are not rotated
    int64_t entry;        // index of the layer's block in a column of a block table
    int64_t is_parallel;  // whether the MLP reads the layer's input: mlp_norm of it, or attention_norm
    int64_t num_experts, top_k; // 1 without a mixture
    int64_t renormalize;  // whether the weights of a token's experts are divided by their sum
};

// Factors of the queries by their positions, one for each `tokens` positions. A count of 0: there are none.
struct Growth {
    const float *factors; // [count], numbers of the model's type
    int64_t count, tokens;

    INLINE float factor(int64_t position) const {
        return count ? factors[std::min(position / tokens, count - 1)] : 1;
    }
};

// The arguments of a forward pass.
struct Forward {
    const Layer *layers;
    const Rope *ropes;
    int64_t num_layers, num_ropes, tokens, hidden;
    Heads heads;
    Rows rows;                       // of the first block of a column; those of the others follow
    const int64_t *ids, *positions;  // [T]
    const int64_t *slot_mapping;     // [T], of the first block of a column; those of the others follow
    const void *embedding;          // [V, hidden], or null
    const Packed *packed_embedding; // the same, if `embedding` is null
    const void *position_embedding; // [positions, hidden], or null
    float *x;                       // [T, hidden]: the output
    void *cos, *sin;                // scratch memory: [num_ropes, T, D]
    void *normed;                   // scratch memory: [T, hidden]
    void *qkv;                      // scratch memory: [T, (H + 2 H_kv) D]
    void *attended;                 // scratch memory: [T, H D], the output of attention
    void *gate_up, *active;         // scratch memory: [T K, 2 I], [T K, I]
    float *delta;                   // scratch memory: [T, hidden], results that are not in x yet
    void *scores;                   // scratch memory: [T, E], of a router
    void *gathered;                 // scratch memory: [T K, hidden], the inputs of experts
    float *parts;                   // scratch memory: [T K, hidden], the results of experts
    double eps, embedding_scale, residual_scale;
    int64_t stored_as; // how the cache stores keys and values (StoredAs)
    Growth growth;
    StepAdapters adapters;
    ImageRows images;
    const int64_t *rope_positions; // [axes, T], or [T] if `rope_stride` is 0; null: `positions`, in all axes
    int64_t rope_stride;           // from an axis to the next: T or 0

    // Returns the position that turns pair i of a token.
    INLINE int64_t rope_position(const Rope &rope, int64_t t, int64_t i) const {
        if (!rope_positions) return positions[t];
        return rope_positions[(rope.axes ? rope.axes[i] * rope_stride : 0) + t];
    }
};

// The forward pass in number type N. All threads of the team call `run`.
template <class N> struct Pass {
    const Forward &f;
    const Work work;
    std::vector<float> partials;
    // Of each layer. A thread that is late may enter a phase when the others compute a later layer, and has
    // to find the same number of items as they did.
    std::vector<Routing> routings;
    RoundedRows &rounded; // the input of the next linear, if that reads rounded rows
    std::vector<int64_t> adapted; // the tokens that have an adapter
    std::vector<std::atomic<int64_t>> pieces_taken; // of each layer's keys and values, to read them ahead

    explicit Pass(const Forward &forward)
        : f(forward), work(forward.rows), rounded(rounded_rows()), adapted(f.adapters.adapted_tokens(f.tokens)),
          pieces_taken((size_t)f.num_layers) {
        for (int64_t i = 0; i < f.num_layers; i++) {
            const Layer &layer = f.layers[i];
            for (const Packed *each : {&layer.qkv, &layer.output, &layer.mlps[0].gate_up, &layer.mlps[0].down})
                if (reads_rounded(*each)) rounded.fit(f.tokens, each->inputs);
        }
        partials.resize((size_t)(work.num_partials * f.heads.kv_heads * group_floats(f.heads)));
        for (int64_t i = 0; i < f.num_layers; i++)
            routings.emplace_back(f.tokens, f.layers[i].num_experts, f.layers[i].top_k);
    }

    // Returns memory of the calling thread for rounded rows, which is kept for the next pass.
    static RoundedRows &rounded_rows() {
        static thread_local RoundedRows rows;
        return rows;
    }

    N *normed() const { return (N *)f.normed; }

    // Rounds row t of x, the input of `reader`, if that reads rounded rows.
    INLINE void round(const N *x, int64_t t, const Packed &reader) {
        if (reads_rounded(reader)) round_row(x + t * reader.inputs, t, reader.inputs, rounded);
    }
    INLINE void round_all(Team &team, const N *x, const Packed &reader) {
        if (reads_rounded(reader)) team.share(LINEARS, f.tokens, [&](int64_t t) { round(x, t, reader); });
    }
    float *x() const { return f.x; }

    // Returns the most phases (team.h) of a pass: one at the start, and eighteen per layer. Of these, eight
    // are for attention, its linears and norms, one for the MLP's norm, eight for experts, and one for images.
    // Adapters need four more per layer.
    int64_t num_phases() const { return 1 + f.num_layers * (18 + (adapted.empty() ? 0 : NUM_ADAPTED)); }

    // Computes a linear, and adds the terms of adapters.
    template <class Y>
    INLINE void adapted_linear(Team &team, const Layer &layer, AdaptedLinear which, const Linear<N, Y> &l) {
        if (adapted.empty()) return linear(team, l);
        const LowRank<N> terms{f.adapters, adapted, f.num_layers, &layer - f.layers, which};
        linear_and(team, l, terms.shrink_items(), [&](int64_t item) { terms.shrink(item, l.x, l.weight.inputs); });
        team.share(LINEARS, terms.expand_items(l.weight.outputs), [&](int64_t item) {
            terms.expand(item, l.y, l.weight.outputs, l.then == ADD ? l.scale : 1);
        }, true);
    }

    // Writes a token's embedding, or its row of an image, to x, and the cos and sin of its position.
    INLINE void start_row(int64_t t) {
        if (const float *row = f.images.row(t, f.hidden)) memcpy(x() + t * f.hidden, row, (size_t)f.hidden * sizeof(float));
        else embed_row(t);
        for (int64_t r = 0; r < f.num_ropes; r++) turn_row(r, t);
    }

    // Writes the embedding of a token to x.
    INLINE void embed_row(int64_t t) {
        N *unpacked = normed() + t * f.hidden;
        if (!f.embedding) gather_row(*f.packed_embedding, f.ids[t], unpacked);
        const N *row = f.embedding ? (const N *)f.embedding + f.ids[t] * f.hidden : unpacked;
        float *to = x() + t * f.hidden;
        for (int64_t i = 0; i < f.hidden; i += LANES) store(to + i, load(row + i) * (float)f.embedding_scale);
        if (f.position_embedding)
            add_row(to, (const N *)f.position_embedding + f.positions[t] * f.hidden, f.hidden);
    }

    // Writes the cos and sin of a token's position for one rotary embedding (layers/rope.py).
    INLINE void turn_row(int64_t r, int64_t t) {
        const Rope &rope = f.ropes[r];
        const int64_t dim = f.heads.dim, half = rope.width / 2, at = (r * f.tokens + t) * dim;
        alignas(64) float c[MAX_DIM], s[MAX_DIM];
        for (int64_t i = 0; i < half; i++) {
            const float angle = (float)f.rope_position(rope, t, i) * rope.inv_freq[i];
            const Turn turn = turn_of(angle);
            c[i] = c[half + i] = turn.cosine * (float)rope.factor;
            s[half + i] = turn.sine * (float)rope.factor;
            s[i] = -s[half + i];
        }
        for (int64_t i = rope.width; i < dim; i++) c[i] = 1, s[i] = 0;
        convert_row(c, (N *)f.cos + at, dim);
        convert_row(s, (N *)f.sin + at, dim);
    }

    // Writes the input of a block to `normed`: the norm of x, or x itself if there is no norm.
    INLINE void norm_x(int64_t t, const Norm &norm) {
        N *to = normed() + t * f.hidden;
        if (norm.weight) norm_row<N>(x() + t * f.hidden, norm, to, f.hidden, (float)f.eps);
        else convert_row(x() + t * f.hidden, to, f.hidden);
    }

    // Computes the norm of x, and rounds it for `reader`. Null: it is not rounded.
    INLINE void norm(Team &team, const Norm &norm, const Packed *reader) {
        team.share(OTHER_LAYERS, f.tokens, [&](int64_t t) {
            norm_x(t, norm);
            if (reader) round(normed(), t, *reader);
        });
    }

    // Does what few models do with rotated queries and keys. Not inlined, so that the others do not pay for it.
    __attribute__((noinline)) void change_rotated(const Layer &layer, N *row, int64_t position) {
        const Heads &h = f.heads;
        if (layer.norms_rotated) {
            norm_heads(row, layer.q_norm, h.heads, h.dim, layer.q_norm_width, (float)f.eps);
            norm_heads(row + h.heads * h.dim, layer.k_norm, h.kv_heads, h.dim, layer.k_norm_width,
                       (float)f.eps);
        }
        if (const float factor = f.growth.factor(position); factor != 1)
            for (int64_t i = 0; i < h.heads * h.dim; i += LANES) store(row + i, load(row + i) * factor);
    }

    // Normalises and rotates a token's queries and keys, and writes keys and values to the cache.
    INLINE void place_row(const Layer &layer, int64_t t) {
        const Heads &h = f.heads;
        N *row = (N *)f.qkv + t * (h.heads + 2 * h.kv_heads) * h.dim;
        const int64_t slot = f.slot_mapping[layer.entry * f.tokens + t];
        if (layer.q_norm.weight && !layer.norms_rotated) {
            norm_heads(row, layer.q_norm, h.heads, h.dim, layer.q_norm_width, (float)f.eps);
            norm_heads(row + h.heads * h.dim, layer.k_norm, h.kv_heads, h.dim, layer.k_norm_width,
                       (float)f.eps);
        }
        if (layer.rope >= 0) {
            const int64_t at = (layer.rope * f.tokens + t) * h.dim;
            rotate_row(row, (const N *)f.cos + at, (const N *)f.sin + at, h, f.ropes[layer.rope].width);
        }
        if (layer.norms_rotated || f.growth.count) change_rotated(layer, row, f.positions[t]);
        in_stored<N>(f.stored_as, [&](auto stored) {
            using S = decltype(stored);
            cache_row<S>(row, layer.k_cache, layer.v_cache, slot * token_items<S>(h), h);
        });
    }

    // Returns the rows of the blocks that a layer uses.
    INLINE Rows rows_of(const Layer &layer) const {
        Rows rows = f.rows;
        rows.block_table += layer.entry * rows.num_rows * rows.table_width;
        return rows;
    }

    // Computes the output of attention from queries, keys and values. S: how the cache stores these.
    template <class S> INLINE void attend_as(Team &team, const Layer &layer) {
        const int64_t width = (f.heads.heads + 2 * f.heads.kv_heads) * f.heads.dim;
        const Rows rows = rows_of(layer);
        const int64_t block_items = rows.block_tokens * token_items<S>(f.heads);
        const Attend<N, S> all{(const N *)f.qkv,         (N *)f.attended, (const S *)layer.k_cache,
                               (const S *)layer.v_cache, block_items,     width,
                               f.heads,                  layer.scoring};
        attend(team, all, rows, work, partials.data());
    }

    // Returns the keys and values that a layer's decode rows see.
    INLINE KeyRuns key_runs(const Layer &layer) {
        int64_t token_bytes = 0;
        in_stored<N>(f.stored_as, [&](auto stored) {
            token_bytes = token_items<decltype(stored)>(f.heads) * (int64_t)sizeof stored;
        });
        return {layer.k_cache, layer.v_cache, token_bytes,
                rows_of(layer), work,         layer.scoring, pieces_taken[(size_t)(&layer - f.layers)]};
    }

    // Lets the linears that this thread computes from now on, until attention, read these keys and values.
    INLINE void read_ahead(const Layer &layer, KeyRuns &runs) {
        // With fewer rows, linears wait for memory as well.
        constexpr int64_t LEAST_ROWS = 4, MOST_RATE = 8 * ReadAhead::WHOLE;
        if (f.rows.num_decodes < LEAST_ROWS) return;
        auto advances = [&](const Packed &weight) {
            return panels_of(weight) * advances_of(f.tokens, weight.inputs / GROUP);
        };
        int64_t all = advances(layer.qkv);
        if (&layer > f.layers) { // the MLP before; of a mixture, it is not known how many rows an expert gets
            const Layer &before = *(&layer - 1);
            if (before.num_experts == 1) all += advances(before.mlps[0].gate_up) + advances(before.mlps[0].down);
        }
        runs.limit(most_bytes_ahead());
        const int64_t lines = std::min(runs.bytes(), most_bytes_ahead()) / LINE;
        row_scratch().reader.begin(runs, std::min(lines * ReadAhead::WHOLE / all + 1, MOST_RATE));
    }

    // Adds the result of a block to x: its last linear, through the norm after the block if there is one. The
    // input is rounded already if the linear reads rounded rows.
    INLINE void add(Team &team, const Layer &layer, AdaptedLinear which, const N *input, const Packed &weight,
                    const void *bias, const Norm &post) {
        const float scale = (float)f.residual_scale;
        adapted_linear(team, layer, which,
                       Linear<N, float>{input, weight, (const N *)bias, post.weight ? f.delta : x(), f.tokens,
                                        post.weight ? STORE : ADD, scale, &rounded});
        if (post.weight) team.share(OTHER_LAYERS, f.tokens, [&](int64_t t) { add_delta(t, post); });
    }

    // Adds a token's row of `delta` to x, through the norm after the block if there is one.
    INLINE void add_delta(int64_t t, const Norm &post) {
        float *delta = f.delta + t * f.hidden;
        if (post.weight) norm_row<N>(delta, post, delta, f.hidden, (float)f.eps);
        add_scaled_row(x() + t * f.hidden, delta, f.hidden, (float)f.residual_scale);
    }

    // Adds attention to x. Before that, writes the MLP's input to `normed` if the layer is parallel: the
    // linear of queries, keys and values is the last one to read attention's input.
    INLINE void attention(Team &team, const Layer &layer) {
        N *qkv = (N *)f.qkv;
        const bool norms_again = layer.is_parallel && layer.mlp_norm.weight;
        norm(team, layer.attention_norm, &layer.qkv);
        adapted_linear(team, layer, QKV, Linear<N, N>{normed(), layer.qkv, (const N *)layer.qkv_bias, qkv, f.tokens,
                                                      STORE, 1, &rounded});
        row_scratch().reader.end();
        team.share(ATTENTION, f.tokens, [&](int64_t t) {
            place_row(layer, t);
            if (norms_again) norm_x(t, layer.mlp_norm);
        });
        in_stored<N>(f.stored_as, [&](auto stored) { attend_as<decltype(stored)>(team, layer); });
        round_all(team, (const N *)f.attended, layer.output);
        add(team, layer, OUTPUT, (const N *)f.attended, layer.output, layer.output_bias, layer.post_attention_norm);
    }

    // Adds the MLP to x. Its input is rounded already, except in a parallel layer.
    INLINE void mlp(Team &team, const Layer &layer) {
        const Mlp &mlp = layer.mlps[0];
        N *gate_up = (N *)f.gate_up;
        if (layer.is_parallel) round_all(team, normed(), mlp.gate_up);
        adapted_linear(team, layer, GATE_UP, Linear<N, N>{normed(), mlp.gate_up, (const N *)mlp.gate_up_bias, gate_up,
                                                          f.tokens, STORE, 1, &rounded});
        activate(team, layer, f.tokens, true);
        add(team, layer, DOWN, (const N *)f.active, mlp.down, mlp.down_bias, layer.post_mlp_norm);
    }

    // Computes the activations of `rows` rows, and rounds them for the next linear if `rounds`.
    INLINE void activate(Team &team, const Layer &layer, int64_t rows, bool rounds) {
        const Packed &down = layer.mlps[0].down;
        const int64_t width = layer.mlps[0].gate_up.outputs, inner = down.inputs;
        N *active = (N *)f.active;
        team.share(OTHER_LAYERS, rows, [&](int64_t i) {
            activate_row(layer.activation, (const N *)f.gate_up + i * width, active + i * inner, inner);
            if (rounds) round(active, i, down);
        });
    }

    // Adds a mixture of experts to x. The results of a token's experts are added in the experts' order.
    INLINE void experts(Team &team, const Layer &layer, Routing &routing) {
        const int64_t top_k = layer.top_k, hidden = f.hidden, inner = layer.mlps[0].down.inputs;
        const int64_t width = layer.mlps[0].gate_up.outputs;
        N *scores = (N *)f.scores, *gathered = (N *)f.gathered;
        linear(team, Linear<N, N>{normed(), layer.router, (const N *)layer.router_bias, scores, f.tokens, STORE});
        team.share(OTHER_LAYERS, f.tokens, [&](int64_t t) {
            routing.choose(t, scores + t * layer.num_experts, layer.renormalize);
        });
        team.share(OTHER_LAYERS, 1, [&](int64_t) { routing.group(); });
        team.share(OTHER_LAYERS, f.tokens, [&](int64_t t) {
            for (int64_t i = t * top_k; i < (t + 1) * top_k; i++)
                memcpy(gathered + routing.places[(size_t)i] * hidden, normed() + t * hidden,
                       (size_t)hidden * sizeof(N));
        });
        linears(team, layer.num_experts, [&](int64_t e) {
            const Mlp &mlp = layer.mlps[e];
            const int64_t first = routing.starts[(size_t)e], rows = routing.starts[(size_t)e + 1] - first;
            return Linear<N, N>{gathered + first * hidden, mlp.gate_up, (const N *)mlp.gate_up_bias,
                                (N *)f.gate_up + first * width, rows, STORE};
        });
        activate(team, layer, f.tokens * top_k, false);
        linears(team, layer.num_experts, [&](int64_t e) {
            const Mlp &mlp = layer.mlps[e];
            const int64_t first = routing.starts[(size_t)e], rows = routing.starts[(size_t)e + 1] - first;
            return Linear<N, float>{(const N *)f.active + first * inner, mlp.down, (const N *)mlp.down_bias,
                                    f.parts + first * hidden, rows, STORE};
        });
        team.share(OTHER_LAYERS, f.tokens, [&](int64_t t) {
            memset(f.delta + t * hidden, 0, (size_t)hidden * sizeof(float));
            for (int64_t i = t * top_k; i < (t + 1) * top_k; i++)
                add_scaled_row(f.delta + t * hidden, f.parts + routing.places[(size_t)i] * hidden, hidden,
                               routing.weights[(size_t)i]);
            add_delta(t, layer.post_mlp_norm);
        });
    }

    void run(Team &team) {
        team.share(OTHER_LAYERS, f.tokens, [&](int64_t t) { start_row(t); });
        KeyRuns runs = key_runs(f.layers[0]);
        read_ahead(f.layers[0], runs);
        for (int64_t i = 0; i < f.num_layers; i++) {
            const Layer &layer = f.layers[i];
            attention(team, layer);
            if (i + 1 < f.num_layers) read_ahead(f.layers[i + 1], runs = key_runs(f.layers[i + 1]));
            const bool is_mixture = layer.num_experts > 1; // experts round the rows that they get
            if (!layer.is_parallel) norm(team, layer.mlp_norm, is_mixture ? nullptr : &layer.mlps[0].gate_up);
            if (is_mixture) experts(team, layer, routings[(size_t)i]);
            else mlp(team, layer);
            if (f.images.are_added(i)) add_images(team, i);
        }
    }

    // Adds to x what images have for the end of a layer.
    void add_images(Team &team, int64_t layer) {
        team.share(OTHER_LAYERS, f.tokens, [&](int64_t t) {
            if (!f.images.row(t, f.hidden)) return;
            const float *row = f.images.added + (layer * f.images.count + f.images.index[t]) * f.hidden;
            add_scaled_row(x() + t * f.hidden, row, f.hidden, 1);
        });
    }
};

} // namespace
