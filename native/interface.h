// What Python hands over: plain C structures of pointers, offsets and sizes.
//
// The documentation of every field is here. engine/backends/native/library.py lists the same fields; layout.cpp exports
// the offset of each, and loading compares.
//
// Legend: B batch entries, Q query rows, K keys, D features, V value features. An operand's row r of entry b starts at
// data + offset[b] + r * row (in elements); its last dimension is contiguous. Broadcasting is an offset table that
// repeats.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

enum PartitaDtype : int32_t { PARTITA_FLOAT32 = 0, PARTITA_FLOAT64 = 1, PARTITA_BFLOAT16 = 2, PARTITA_FLOAT16 = 3 };

struct PartitaOperand {
  void* data;  // null where absent
  const int64_t* offset;
  int64_t row;
  int64_t col;  // 1, or 0 where one number serves every key (bias and mask only)
};

struct PartitaProblem {
  int64_t B, Q, K, D, V;
  int32_t dtype;       // of query, key and value
  int32_t bias_dtype;  // float32 or float64 or that of query
  int32_t threads;
  int32_t exact;   // no bit of a row depends on other rows, on threads, or on what is hidden
  double softcap;  // 0 where absent
  PartitaOperand query, key, value, scale, bias, target, start, stop, query_segment, key_segment, mask, skip;
};

// Row outputs are contiguous (B, Q); null where not wanted. Where there is no target, target_score is key 0's. Row r of
// entry b of moment (V numbers) starts at moment + moment_offset[b] + r * moment_row. Peaks are double, second is about
// the mean, the rest in the accumulation dtype.
struct PartitaSums {
  void *peak, *mass, *first, *second, *moment, *target_score, *count;
  int64_t* rank;
  void *col_peak, *col_mass;  // (K) sums over rows, both or none; only where B is 1
  void* stats;                // (5, B, Q): log Z, entropy, mean, variance and maximum of the score
  int32_t mean;  // 1: moment is given divided by the mass, the mean value; 2: as bfloat16 too, where there are pairs
  int32_t forward_only;  // no backward pass follows, which would have to find the same scores again, to the last bit
  const int64_t* moment_offset;
  int64_t moment_row;
  int64_t* argmax;  // the first key of the largest score, -1 where there is none
};

// Upstream gradients and results, all contiguous in the accumulation dtype, but for the key's where `rounded` is set;
// null where absent or not wanted.
struct PartitaGradients {
  const int64_t* group;  // (B) which key (and value) an entry uses; numbers from 0, none left out
  int64_t groups;
  const void *peak, *mass, *first, *second, *moment, *target;
  void *query, *scale;              // (B, Q, D), (B, Q)
  void *key, *value;                // (groups, K, D), (groups, K, V)
  void* bias_row;                   // (B, Q): sum over keys
  void* bias_col;                   // (B, K): sum over rows
  PartitaOperand bias;              // one number per row and key, accumulated into zeros
  int64_t bias_is_shared;           // entries repeat in bias.offset
  const void *col_peak, *col_mass;  // (K), col_peak as the forward pass gave it; only where B is 1
  int64_t rounded;                  // the key's gradient is stored as bfloat16
};

// What each key receives: sum_i weight_i exp(s_ij - peak_i) over the rows of the entries that share a slot.
struct PartitaColumns {
  const double* peak;   // (B, Q), as the forward pass gave it
  const void* weight;   // (B, Q), accumulation dtype
  const int64_t* slot;  // (B), from 0, none left out
  int64_t slots;
  void* sums;  // (slots, K)
};

// The best scores of every row, in falling order; past the visible keys -inf and -1.
struct PartitaTop {
  int64_t k;       // at least 1, and small: a row is searched through
  void* score;     // (B, Q, k), accumulation dtype
  int64_t* index;  // (B, Q, k)
};

// How many keys of each row score within each edge of its largest score.
struct PartitaGaps {
  int64_t edges;     // at least 1
  const void* edge;  // (edges), accumulation dtype, not negative, rising
  int64_t* count;    // (B, Q, edges)
};

// Plain attention: what changes from call to call where shapes and strides have been seen before.
struct PartitaAttention {
  double scale;
  void *query, *key, *value;
  void *mean, *stats, *count, *first;  // null where not wanted; first: the score of key 0
};

// Rows of explicit logits (float32 or float64), a stride of `row`: their softmax sums, and the gradient of
// sum_i weight_i nll_i in place of the logits.
struct PartitaSoftmaxRows {
  int64_t rows, cols, row;
  int32_t dtype, threads;
  int32_t gradient;  // 0 none, 1 wanted, 2 rounded to bfloat16, at the beginning of its row; where there are pairs
  int32_t unused;
  void* logits;
  const void* bias;                  // (cols), added first, or null
  const int64_t* target;             // (rows), out of range where there is none
  const void* weight;                // (rows), or null for 0
  void *peak, *mass, *target_score;  // (rows)
};

// Rows of a classifier: logits = input weight^T, in float32 (float64 of float64). Of bfloat16 also
//
//   input gradient = p weight       weight gradient += p^T input       p = dloss / dlogits
//
// where a gradient is float32 and contiguous, in the place of what it is the gradient of, and p is in the place of the
// logits as `PartitaSoftmaxRows` leaves it with gradient 2.
struct PartitaLogits {
  int64_t rows, classes, dim;
  int64_t weight_row, logits_row;  // elements from one class, or one row of logits, to the next
  int32_t dtype, threads;
  const void *input, *weight;  // (rows, dim) contiguous, (classes, dim)
  void* logits;                // (rows, classes)
};

// Rows of explicit scores of two distributions (float32 or float64), strides `p_row` and `q_row`, with room for whole
// vectors: their divergence, and the gradients of sum_i weight_i divergence_i in place of the scores.
struct PartitaDivergenceRows {
  int64_t rows, cols, p_row, q_row;
  int64_t record_row;  // elements from one of the six numbers of a row to the next
  int32_t dtype, threads;
  int32_t kind;  // 0 forward, 1 reverse, 2 cross entropy, 3 js, 4 hellinger
  int32_t p_gradient, q_gradient, unused;
  double beta;
  void *p, *q;
  const void *p_bias, *q_bias;                         // (cols), added first, or null
  const int32_t *p_start, *p_stop, *q_start, *q_stop;  // (rows): the columns a row sees, or null
  const void* weight;                                  // (rows), or null for no gradients
  void* record;                                        // (6, rows)
};

}  // extern "C"
