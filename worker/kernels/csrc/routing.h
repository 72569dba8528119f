// The choice of experts of a mixture, and the order in which they compute rows (layers/mlp.py).
//
// Legend: T tokens, E experts, K experts chosen for each token. An assignment is a token and one of its
// experts. The assignments of an expert stand together, so that it computes all its rows at once.
#pragma once

#include <cmath>
#include <utility>
#include <vector>

#include "functions.h"

namespace {

// The assignments of one layer in a step.
struct Routing {
    int64_t experts, top_k;
    std::vector<int64_t> chosen; // [T, K]: the experts of each token, ascending
    std::vector<float> weights;  // [T, K]: the factors of their results
    std::vector<int64_t> places; // [T, K]: where each assignment stands in the order by expert
    std::vector<int64_t> starts; // [E + 1]: the first place of each expert, and T K

    // A layer without a mixture has one expert and needs no memory.
    Routing(int64_t tokens, int64_t num_experts, int64_t k) : experts(num_experts), top_k(k) {
        if (experts == 1) return;
        chosen.resize((size_t)(tokens * k));
        weights.resize((size_t)(tokens * k));
        places.resize((size_t)(tokens * k));
        starts.resize((size_t)(experts + 1));
    }

    // Chooses the experts of token t by their scores [E]. A weight is the softmax of a score, rounded to
    // number type N; with `renormalize`, the weights of the chosen experts are divided by their sum. Of
    // equal scores, the first is chosen.
    template <class N> void choose(int64_t t, const N *scores, bool renormalize) {
        int64_t *own = chosen.data() + t * top_k;
        float *share = weights.data() + t * top_k, peak = -INFINITY, total = 0;
        for (int64_t e = 0; e < experts; e++) { // std::fmax here crashes g++ 12 for ARM
            const float score = to_float(scores[e]);
            peak = score > peak ? score : peak;
        }
        for (int64_t e = 0; e < experts; e++) total += exponential(to_float(scores[e]) - peak);
        for (int64_t k = 0; k < top_k; k++) {
            own[k] = next_best(scores, own, k);
            share[k] = exponential(to_float(scores[own[k]]) - peak) / total;
        }
        float sum = 0;
        for (int64_t k = 0; k < top_k; k++) sum += share[k];
        for (int64_t k = 0; k < top_k; k++)
            share[k] = as_stored(N{}, splat(renormalize ? share[k] / sum : share[k]))[0];
        for (int64_t k = 1; k < top_k; k++)
            for (int64_t j = k; j > 0 && own[j - 1] > own[j]; j--) {
                std::swap(own[j - 1], own[j]);
                std::swap(share[j - 1], share[j]);
            }
    }

    // Orders the assignments of all tokens by expert, and those of an expert by token.
    void group() {
        starts.assign(starts.size(), 0);
        for (int64_t e : chosen) starts[(size_t)e + 1]++;
        for (size_t e = 1; e < starts.size(); e++) starts[e] += starts[e - 1];
        std::vector<int64_t> next(starts);
        for (size_t i = 0; i < chosen.size(); i++) places[i] = next[(size_t)chosen[i]]++;
    }

  private:
    // Returns the expert with the greatest score but for `count` experts in `taken`. NaN counts as the
    // least score.
    template <class N> int64_t next_best(const N *scores, const int64_t *taken, int64_t count) const {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; e++) {
            bool is_taken = false;
            for (int64_t k = 0; k < count; k++) is_taken |= taken[k] == e;
            if (is_taken) continue;
            if (best < 0 || to_float(scores[e]) > to_float(scores[best])) best = e;
        }
        return best;
    }
};

} // namespace
