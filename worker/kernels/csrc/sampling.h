// Chooses the next token of a row from its logits, as worker/sampling/sampler.py and logits.py define it.
//
// The torch code in these files is the reference, and both choose the same token, bit for bit: all operations on
// single numbers round alike (products are never fused with sums, and `exact_exp` is the same polynomial), and all sums
// over the vocabulary are sums of integers.
//
// The logits of a row are read once for the greatest of each block of BLOCK tokens, and once for the shares. Blocks
// without a token that has a weight are skipped, and a filter looks at the few tokens above a threshold only.
//
// Legend: V vocabulary, K blocks of a row, L tokens that a slot can hold.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t BLOCK = 128;
constexpr int WEIGHT_BITS = 52; // a row's total weight is below 2^52 (worker/sampling/exact_probs.py)
constexpr int DIGIT_BITS = 10, NUM_DIGITS = 3; // of a share's bits, which are below 2^30

// The fields of the slot table (worker/slots/fields.py) that choosing a token reads, each with one row per slot.
struct Sampler {
    const int32_t *token_ids, *lens, *prompt_lens;
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k;
    const int64_t *seeds;
    const float *repetition, *frequency, *presence;
    const int32_t *num_bias, *bias_ids;
    const float *bias_values;
    const int32_t *num_stops, *stop_ids, *min_lens;
    int64_t max_tokens, max_bias, max_stops; // widths of token_ids, of bias_ids and bias_values, and of stop_ids
};

// Returns x. The compiler cannot fuse the product x with a sum that adds it, so both are rounded.
template <class V> INLINE V parted(V x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#else
    asm("" : "+m"(x));
#endif
    return x;
}

// Returns e^x of x <= 0, and 0 below -87 and for NaN: `exact_exp` of worker/sampling/exact_probs.py, operation by
// operation.
INLINE Floats exact_exp(Floats x) {
    const Floats least = splat(-87.0f);
    const Floats y = x >= least ? x : least;
    const Floats turns = parted(y * 1.4426950408889634f) + 0.5f;
    Ints power = __builtin_convertvector(turns, Ints);
    power += (Ints)(__builtin_convertvector(power, Floats) > turns); // truncated -> floor
    const Floats n = __builtin_convertvector(power, Floats);
    Floats r = y - parted(n * 0.693359375f);
    r = r + parted(n * 2.1219444005469057e-04f);
    Floats p = parted(r * 0.0013814320470879827f) + 0.008368851204697565f;
    p = parted(p * r) + 0.041668401095087036f;
    p = parted(p * r) + 0.16666519522901047f;
    p = parted(p * r) + 0.4999999337300976f;
    p = parted(p * r * r) + r + 1.0f;
    return x >= least ? p * (Floats)((power + 127) << 23) : Floats{};
}

INLINE uint64_t mixed_word(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Returns a uniform random number in [0, 1): draw 0 of this seed and position (worker/sampling/randomness.py).
INLINE double uniform(int64_t seed, int64_t position) {
    constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u;
    uint64_t state = mixed_word((uint64_t)seed + GAMMA);
    state = mixed_word((state ^ (uint64_t)position) + GAMMA);
    return (double)(mixed_word(state + GAMMA) >> 11) * 0x1p-53;
}

// The memory of one thread, for one row at a time.
struct SamplingMemory {
    std::vector<float> shares, greatest; // [K * BLOCK]; [K] of a block's logits, and then of its shares
    std::vector<int64_t> masses;         // [K] sums of the weights
    std::vector<int32_t> ids;            // the candidates, in ascending order,
    std::vector<float> kept;             // and their shares
    std::vector<int32_t> counts;         // [V], all 0 between two rows
    std::vector<std::pair<int32_t, float>> replaced; // tokens, and their logits before a change

    void fit(int64_t vocab) {
        const size_t blocks = (size_t)((vocab + BLOCK - 1) / BLOCK), padded = blocks * BLOCK;
        if (greatest.size() == blocks && counts.size() == (size_t)vocab) return;
        shares.resize(padded);
        greatest.resize(blocks);
        masses.resize(blocks);
        ids.resize(padded);
        kept.resize(padded);
        counts.assign((size_t)vocab, 0);
    }
};

// Returns the memory of the calling thread.
inline SamplingMemory &sampling_memory() {
    static thread_local SamplingMemory memory;
    return memory;
}

// Calls body(lane index, vector) for the vectors of a block. Behind the end of the row, lanes have `rest`.
template <class Body> INLINE void each_vector(const float *row, int64_t vocab, int64_t first, float rest, Body &&body) {
    const int64_t count = std::min(BLOCK, vocab - first);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) body(i, load(row + first + i));
    if (i < count) {
        float last[LANES];
        for (int64_t lane = 0; lane < LANES; lane++) last[lane] = i + lane < count ? row[first + i + lane] : rest;
        body(i, load(last));
    }
}

// The logits of one row, changed by the bias and the penalties of its request while the object lives.
class ChangedRow {
  public:
    ChangedRow(const Sampler &sampler, int64_t slot, int64_t known, float *row, int64_t vocab, SamplingMemory &memory)
        : row_(row), vocab_(vocab), memory_(memory) {
        memory.replaced.clear();
        add_bias(sampler, slot);
        const int32_t *tokens = sampler.token_ids + slot * sampler.max_tokens;
        // A slot may hold drafts that follow the place.
        const int64_t end = std::min((int64_t)sampler.lens[slot], known);
        penalise_repetition(tokens, end, sampler.repetition[slot]);
        penalise_counts(tokens, sampler.prompt_lens[slot], end, sampler.frequency[slot], sampler.presence[slot]);
        if (known >= sampler.min_lens[slot]) return;
        for (int32_t i = 0; i < sampler.num_stops[slot]; i++) put(sampler.stop_ids[slot * sampler.max_stops + i], -INFINITY);
    }

    ~ChangedRow() {
        for (size_t i = memory_.replaced.size(); i-- > 0;) row_[memory_.replaced[i].first] = memory_.replaced[i].second;
    }

    ChangedRow(const ChangedRow &) = delete;
    ChangedRow &operator=(const ChangedRow &) = delete;

  private:
    bool exists(int32_t token) const { return token >= 0 && token < vocab_; }

    void put(int32_t token, float logit) {
        if (!exists(token)) return;
        memory_.replaced.emplace_back(token, row_[token]);
        row_[token] = logit;
    }

    void add_bias(const Sampler &sampler, int64_t slot) {
        for (int64_t i = slot * sampler.max_bias; i < slot * sampler.max_bias + sampler.num_bias[slot]; i++)
            if (exists(sampler.bias_ids[i])) put(sampler.bias_ids[i], row_[sampler.bias_ids[i]] + sampler.bias_values[i]);
    }

    void penalise_repetition(const int32_t *tokens, int64_t end, float penalty) {
        if (penalty == 1) return;
        for (int64_t i = 0; i < end; i++) {
            if (!exists(tokens[i]) || memory_.counts[(size_t)tokens[i]]++) continue;
            const float old = row_[tokens[i]];
            put(tokens[i], old > 0 ? old / penalty : old * penalty);
        }
        forget(tokens, 0, end);
    }

    void penalise_counts(const int32_t *tokens, int64_t start, int64_t end, float frequency, float presence) {
        if (frequency == 0 && presence == 0) return;
        for (int64_t i = start; i < end; i++)
            if (exists(tokens[i])) memory_.counts[(size_t)tokens[i]]++;
        for (int64_t i = start; i < end; i++) {
            if (!exists(tokens[i])) continue;
            int32_t &count = memory_.counts[(size_t)tokens[i]];
            if (count) put(tokens[i], row_[tokens[i]] - (parted(frequency * (float)count) + presence));
            count = 0;
        }
    }

    void forget(const int32_t *tokens, int64_t start, int64_t end) {
        for (int64_t i = start; i < end; i++)
            if (exists(tokens[i])) memory_.counts[(size_t)tokens[i]] = 0;
    }

    float *row_;
    int64_t vocab_;
    SamplingMemory &memory_;
};

// Draws a token from the logits of one row.
class RowDraw {
  public:
    RowDraw(const float *row, int64_t vocab, SamplingMemory &memory)
        : row_(row), vocab_(vocab), blocks_((int64_t)memory.greatest.size()), memory_(memory) {
        int bits = WEIGHT_BITS;
        for (int64_t left = vocab; left; left >>= 1) bits--;
        scale_ = (float)((int64_t)1 << bits);
        least_ = 1 / scale_;
        // Even with the rounding of the exponential, shares below this gap have no weight.
        farthest_ = -0.6932f * (float)(bits + 1);
    }

    // Finds the greatest logit. Returns whether it is finite, and no logit is NaN.
    bool find_peak() {
        peak_ = -INFINITY;
        Ints odd = {};
        for (int64_t k = 0; k < blocks_; k++) {
            Floats best = splat(-INFINITY);
            each_vector(row_, vocab_, k * BLOCK, -INFINITY, [&](int64_t, Floats x) {
                best = max_of(x, best);
                odd |= (Ints)(x != x);
            });
            const float greatest = max_in(best);
            memory_.greatest[(size_t)k] = greatest;
            peak_ = greatest > peak_ ? greatest : peak_;
        }
        for (int lane = 0; lane < LANES; lane++)
            if (odd[lane]) return false;
        return peak_ - peak_ == 0;
    }

    // Returns the first token with the greatest logit.
    int64_t most_likely() const {
        int64_t k = 0;
        while (memory_.greatest[(size_t)k] != peak_) k++;
        int64_t token = k * BLOCK;
        while (row_[token] != peak_) token++;
        return token;
    }

    // Computes the shares, the greatest share and the weight of each block, and returns the total weight.
    int64_t weigh(float temperature) {
        int64_t total = 0;
        for (int64_t k = 0; k < blocks_; k++) {
            float &greatest = memory_.greatest[(size_t)k];
            int64_t &mass = memory_.masses[(size_t)k];
            mass = 0;
            if ((greatest - peak_) / temperature < farthest_) {
                greatest = 0;
                continue;
            }
            float *shares = memory_.shares.data() + k * BLOCK;
            Floats best = {};
            each_vector(row_, vocab_, k * BLOCK, -INFINITY, [&](int64_t i, Floats x) {
                const Floats share = exact_exp((x - peak_) / temperature);
                store(shares + i, share);
                best = max_of(share, best);
            });
            for (int64_t i = vocab_ - k * BLOCK; i < BLOCK; i++) shares[i] = 0;
            for (int64_t i = 0; i < BLOCK; i++) mass += weight(shares[i]);
            greatest = max_in(best);
            total += mass;
        }
        total_ = total;
        return total;
    }

    // Returns the token at u of the distribution that the filters leave. The values top_k 0, top_p 1 and min_p 0 switch a
    // filter off.
    int64_t draw(double u, int64_t top_k, float top_p, float min_p) {
        float bound = 0;
        if (top_k > 0 && top_k < vocab_) bound = kth_largest(top_k);
        if (top_p < 1) bound = heaviest(bound, top_p);
        bound = bound > min_p ? bound : min_p;
        return bound > 0 ? among_candidates(u, bound) : among_all(u);
    }

  private:
    INLINE int64_t weight(float share) const { return (int64_t)(share * scale_); }

    // Makes all tokens with shares from `threshold` on the candidates.
    void gather(float threshold) {
        threshold_ = threshold;
        count_ = 0;
        for (int64_t k = 0; k < blocks_; k++) {
            if (memory_.greatest[(size_t)k] < threshold) continue;
            for (int64_t i = k * BLOCK; i < (k + 1) * BLOCK; i++) {
                const float share = memory_.shares[(size_t)i];
                memory_.ids[count_] = (int32_t)i;
                memory_.kept[count_] = share;
                count_ += share >= threshold;
            }
        }
    }

    // Makes ever more tokens the candidates, until `is_enough` returns true, or all tokens with a weight are.
    template <class IsEnough> bool gather_until(IsEnough &&is_enough) {
        for (float threshold = 0x1p-8f; threshold > least_; threshold *= 0x1p-8f) {
            gather(threshold);
            if (is_enough()) return true;
        }
        gather(least_);
        return is_enough();
    }

    int64_t weight_from(float bound) const {
        int64_t sum = 0;
        for (size_t c = 0; c < count_; c++) sum += memory_.kept[c] >= bound ? weight(memory_.kept[c]) : 0;
        return sum;
    }

    // Returns the k-th largest share, or 0 if fewer tokens have a weight.
    float kth_largest(int64_t k) {
        if (!gather_until([&] { return (int64_t)count_ >= k; })) return 0;
        return reaching(k, 0, [](float) { return (int64_t)1; });
    }

    // Returns the largest share from which on the shares hold `part` of the weight of all shares from `bound` on.
    float heaviest(float bound, float part) {
        const int64_t mass = bound > 0 ? weight_from(bound) : total_;
        int64_t target = (int64_t)std::ceil((double)mass * (double)part);
        target = std::min(std::max(target, (int64_t)1), mass);
        if (!(bound > 0)) gather_until([&] { return weight_from(0) >= target; });
        return reaching(target, bound, [&](float share) { return weight(share); });
    }

    // Returns the largest share such that the candidates from it on, and from `bound` on, have `target` in sum. Its bits
    // are found digit by digit, from the highest.
    template <class Value> float reaching(int64_t target, float bound, Value &&value) {
        int64_t sums[1 << DIGIT_BITS];
        uint32_t found = 0;
        for (int digit = NUM_DIGITS - 1; digit >= 0; digit--) {
            const int shift = digit * DIGIT_BITS;
            memset(sums, 0, sizeof sums);
            for (size_t c = 0; c < count_; c++) {
                const float share = memory_.kept[c];
                uint32_t bits;
                memcpy(&bits, &share, 4);
                const bool agrees = (uint64_t)bits >> (shift + DIGIT_BITS) == found;
                if (agrees && share >= bound) sums[(bits >> shift) & ((1 << DIGIT_BITS) - 1)] += value(share);
            }
            int64_t at = (1 << DIGIT_BITS) - 1;
            for (; at > 0 && sums[at] < target; at--) target -= sums[at];
            found = (found << DIGIT_BITS) | (uint32_t)at;
        }
        float share;
        memcpy(&share, &found, 4);
        return share;
    }

    int64_t among_candidates(double u, float bound) {
        const float least = bound > least_ ? bound : least_;
        if (!(threshold_ <= least)) gather(least);
        int64_t left = (int64_t)((double)weight_from(bound) * u);
        for (size_t c = 0; c < count_; c++) {
            if (memory_.kept[c] < bound) continue;
            left -= weight(memory_.kept[c]);
            if (left < 0) return memory_.ids[c];
        }
        return vocab_ - 1;
    }

    int64_t among_all(double u) const {
        int64_t left = (int64_t)((double)total_ * u), k = 0;
        while (k < blocks_ - 1 && left >= memory_.masses[(size_t)k]) left -= memory_.masses[(size_t)k++];
        for (int64_t token = k * BLOCK; token < vocab_; token++) {
            left -= weight(memory_.shares[(size_t)token]);
            if (left < 0) return token;
        }
        return vocab_ - 1;
    }

    const float *row_;
    int64_t vocab_, blocks_, total_ = 0;
    size_t count_ = 0;
    SamplingMemory &memory_;
    float peak_ = 0, scale_, least_, farthest_, threshold_ = INFINITY;
};

struct ChosenToken {
    int64_t token; // 0 if not finite
    bool finite;   // whether the greatest logit is finite, and no logit is NaN
};

// Chooses the token of a row at position `known` of its slot. If `changes`, the bias and the penalties of the request are
// applied to the row, and taken back.
inline ChosenToken choose_token(const Sampler &sampler, int64_t slot, int64_t known, float *row, int64_t vocab,
                                bool changes) {
    SamplingMemory &memory = sampling_memory();
    memory.fit(vocab);
    RowDraw draw(row, vocab, memory);
    const auto chosen = [&]() -> ChosenToken {
        if (!draw.find_peak()) return {0, false};
        const float temperature = sampler.temperature[slot];
        if (temperature == 0) return {draw.most_likely(), true};
        draw.weigh(temperature);
        const double u = uniform(sampler.seeds[slot], known);
        return {draw.draw(u, sampler.top_k[slot], sampler.top_p[slot], sampler.min_p[slot]), true};
    };
    if (!changes) return chosen();
    const ChangedRow changed(sampler, slot, known, row, vocab, memory);
    return chosen();
}

} // namespace
