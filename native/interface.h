// What Python hands over: plain C structures of pointers, offsets and sizes. engine/native.py mirrors them field by field.
//
// Legend: B batch entries, Q query rows, K keys, D features, V value features. An operand's row r of entry b starts at
// data + offset[b] + r * row (in elements); its last dimension is contiguous. Broadcasting is an offset table that repeats.
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
  int32_t hole;    // key i is invisible to row i
  double softcap;  // 0 where absent
  PartitaOperand query, key, value, scale, bias, target, start, stop, query_segment, key_segment, mask;
};

// Row outputs are contiguous (B, Q); null where not wanted. Row r of entry b of moment (V numbers) starts at
// moment + moment_offset[b] + r * moment_row. Peaks are double, second is about the mean
// (columns: about the peak), the rest in the accumulation dtype.
struct PartitaSums {
  void *peak, *mass, *first, *second, *moment, *target_score, *count;
  int64_t* rank;
  void *col_peak, *col_mass, *col_first, *col_second;  // (K) sums over rows, all or none; only where B is 1
  void* stats;   // (5, B, Q): log Z, entropy, mean, variance and maximum of the score
  int32_t mean;  // moment is given divided by the mass: the mean value
  int32_t last;  // no backward pass follows, which would have to find the same scores again, to the last bit
  const int64_t* moment_offset;
  int64_t moment_row;
};

// Upstream gradients and results, all contiguous in the accumulation dtype; null where absent or not wanted.
struct PartitaGradients {
  const int64_t* group;  // (B) which key (and value) an entry uses; numbers from 0, none left out
  int64_t groups;
  const void *peak, *mass, *first, *second, *moment, *target;
  void *query, *scale;     // (B, Q, D), (B, Q)
  void *key, *value;       // (groups, K, D), (groups, K, V)
  void *bias_row;          // (B, Q): sum over keys
  void *bias_col;          // (B, K): sum over rows
  PartitaOperand bias;     // one number per row and key, accumulated into zeros
  int64_t bias_is_shared;  // entries repeat in bias.offset
  const void *col_peak, *col_mass, *col_first, *col_second;  // (K), col_peak as the forward pass gave it; only where B is 1
};

// Rows of explicit logits (float32 or float64), `ld` apart, and what is made of them.
struct PartitaRows {
  int64_t rows, cols, ld;
  int32_t dtype, threads, gradient, unused;  // gradient: in place of the logits
  void* logits;
  const void* bias;                         // (cols), added first, or null
  const int64_t* target;                    // (rows), out of range where there is none, or null
  const void *nll, *square, *spread;        // (rows) weights of the loss, or null for 0
  void *peak, *mass, *first, *second, *target_score;
  int64_t* rank;  // or null
};

// Rows of a classifier (float32 or float64): logits = input weight^T.
struct PartitaLogits {
  int64_t rows, classes, dim;
  int64_t weight_row, logits_row;  // elements from one class, or one row of logits, to the next
  int32_t dtype, threads;
  const void *input, *weight;  // (rows, dim) contiguous, (classes, dim)
  void* logits;                // (rows, classes)
};

// Statistics of rows to be added to the sums of their head (float32 in, double out).
struct PartitaTally {
  int64_t batch, heads, rows, dim;
  int32_t threads, unused;
  float scale, unused_too;
  const float *entropy, *log_z, *variance, *top, *visible;  // (batch, heads, rows) contiguous
  const float* sink;                                        // the same: mass on key 0; or null, and then from
  const float *query, *key;                                 // query rows and key 0, a row contiguous
  int64_t query_batch, query_head, query_row, key_batch, key_head;
  const uint8_t* keep;                                      // (batch, rows), or null
  double *sums, *peak, *length, *histogram, *bands;         // (11, heads), (heads), (heads), (heads, 256), (5, heads, 24)
};

}  // extern "C"

namespace partita {

// Rows [first, first + rows) of a group's flat row list (entry-major, then row) against keys [key_begin, key_end).
struct Task {
  int64_t group, first, rows, key_begin, key_end;
  int64_t partial;  // where its unfinished sums go, in rows; -1 where it finishes its rows itself
  int64_t work;
  int64_t piece;  // number of its row block
};

// One row block whose keys were split: `splits` tasks from `task` on, merged in that order.
struct Merge {
  int64_t group, first, rows, partial, splits;
};

// Groups [group, group_end) are packed together, then tasks [task, task_end) run.
struct Wave {
  int64_t group, group_end, task, task_end;
};

// How a call is cut. Groups are entries that share key and value. Made once per call, outside the hot code.
struct Plan {
  int64_t groups, waves, merges, partial_rows, rows;  // rows: of the largest task
  int64_t pieces;                                     // row blocks
  bool prepacked;                                     // packed keys are shared by several tasks
  const int64_t* entries;                             // (B) entry numbers, group by group
  const int64_t* begin;                               // (groups + 1) where each group starts in `entries`
  const Task* task;
  const Wave* wave;
  const Merge* merge;
};

// Backward: rows [row, row_end) of every entry of a group against keys [key_begin, key_end).
struct Patch {
  int64_t group, row, row_end, key_begin, key_end;
  int64_t row_split, key_split;  // which partial sums it adds to
};

// Patches [begin[i], begin[i + 1]) run in order on one thread; threads take such lists as they come.
struct BackwardPlan {
  int64_t groups, lists, row_splits, key_splits;
  const int64_t *entries, *entry_begin;
  const int64_t* begin;
  const Patch* patch;
};

struct Tuning {
  int64_t tile, keys;      // rows of a register tile, keys of a key block
  int64_t packed_bytes;    // of one group, when prepacked
  bool columns;            // few row blocks: each has sums of all columns
};

// Scratch memory of the calling thread, kept between calls: 64-byte aligned, null when memory is exhausted.
void* scratch(size_t bytes);

// Memory that the threads of a call share, for as long as this object lives. Up to 8 MB stay with the calling thread for
// the next call: to take them from the system each time costs a few per cent of a short one, page by page.
class Shared {
 public:
  explicit Shared(size_t bytes);
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  void* data;  // 64-byte aligned, null when memory is exhausted

 private:
  bool kept_;
};

}  // namespace partita
