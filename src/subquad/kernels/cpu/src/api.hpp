// What Python hands over: plain pointers and sizes, mirrored field by field in library.py.
//
// Letters, here and in all other files: B batch, H query heads, K key heads, T queries, S keys, D head dim, Dv value dim,
// V = Dv + 1 (sums of values, and the total of the weights last), M features (of a slice, inside a task).
#pragma once
#include <cstdint>

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
// EXP keeps logarithms and running maxima (FAVOR); the others act on each number alone (linear attention).
enum Kind : int32_t { EXP = 0, ELU1 = 1, RELU = 2, SOFTPLUS = 3, RELU2 = 4, IDENTITY = 5 };
enum Rule : int32_t { NONE = 0, NORM = 1, GROUPS = 2 };

// [B, H, T, D] of the problem's dtype, the last dimension dense, strides in numbers.
struct Array {
  const void* data;
  int64_t batch, head, token;
};

// Pointers may be null where a field says so.
struct Problem {
  int32_t dtype, kind, rule, rule_groups;
  int32_t batch, key_heads, groups, map_heads;  // groups: query heads per key head
  int32_t head_dim, value_dim, num_features, sinks;
  int32_t causal, gaussian, near_blocks, mask_batch;  // mask_batch: rows of alive, fold and sink_seen, 1 or B
  int32_t block, blocks_per_segment, threads;
  int32_t slices, stretches;  // of a head's features (EXP), of its tokens (others), where heads are fewer than threads
  int32_t near, reach;        // tokens per near block, of which a block has one or more; blocks that are exact on a side
  int32_t far;                // 0: near blocks and sinks alone
  int64_t tile;  // queries done at once, at most 64
  int64_t length, key_length;
  float root;
  Array q, k, v, sink_k, sink_v;
  const float *query, *key;                   // [map_heads, M, D]; null: features of q and k as they are
  const float *key_bias;                      // [map_heads, M] (EXP)
  const float *offset_weight, *offset_bias;   // [map_heads, D], [map_heads], or null
  const uint8_t *alive, *fold;                // [mask_batch, S] or null
  const int64_t* sink_seen;                   // [mask_batch, T] or null
  const float *far_max, *far_sum;             // [B, K, M], [B, K, M, V], or null
};

// All float32 (but `low`) and dense. `borders` are the states at which segments begin, in the order of the sweeps; row M of
// their sums is the centre of the values.
struct Forward {
  float* out;                        // [B, H, T, Dv]
  float* normaliser;                 // [B, H, T, 2] logarithms (far, exact); [B, H, T] sums unless EXP
  int8_t* low;                       // [B, H, T, Dv] what rounding left out of `out`, see low.hpp, or null
  float *borders_max, *borders_sum;  // [borders, B, K, M], [borders, B, K, M + 1, V], or null
  float *far_max, *far_sum;          // after the last token, or null
};

struct Backward {
  Array grad_out, out;                          // of the problem's dtype
  const float* normaliser;
  const int8_t* low;                            // or null
  const float *borders_max, *borders_sum;
  float *dq, *dk, *dv;                          // filled
  float *dsink_k, *dsink_v;                     // [slices, B, K, sinks, ..]
  float *dquery, *dkey, *dkey_bias;             // [B, K, M, D], [B, K, M], or null: not wanted
  float *doffset_weight, *doffset_bias;         // [slices, B, K, D], [slices, B, K], or null
  const float* grad_last_far_sum;               // [B, K, M, V], or null: zeros
  float* dfar_sum;                              // of the first state, filled, or null
};

// One token for every sequence. `before` is the caller's and stays as it is; a null in `after` means: as before.
struct Kept {
  void *sink_k, *sink_v;               // [B, K, sinks, ..] dtype
  void *block_k, *block_v;             // [B, K, (reach + 1) near, ..] dtype
  float *far_max, *far_sum, *far_low;  // [B, K, M], [B, K, M, V]; far_low: what far_sum was rounded by
};
struct Step {
  const uint8_t* real;    // [B], or null: all of them
  const int64_t* length;  // [B] tokens before this one, or null where no position matters
  Kept before, after;
  float* out;             // [B, H, Dv]
};

// A convolution over neighbouring tokens (convolution.hpp); all tensors are float32 and dense, E channels.
struct Convolution {
  int32_t threads, width, causal;
  int32_t part;  // tokens of a task, whose part of the taps' gradients is one sum
  int64_t batch, length, channels;
  const float *x, *taps;  // [B, T, E], [width, E]
  const float* grad;      // [B, T, E] of the output, or null: `out` is the output
  float* out;             // [B, T, E] the output, or the gradient of x, or null
  float* dtaps;           // [B, parts, width, E] parts of the taps' gradients, or null
};

// One token more for every sequence, causal. Its channels come in one part or two, E = first + second; float32, dense.
struct ConvolutionStep {
  int32_t width;
  float rate;  // taps per unit of weight
  int64_t batch, first, second;
  const float* weight;           // [E, 1, width] the token's own first
  const float* recent;           // [B, width - 1, E] inputs before this one, the oldest first
  const float *x, *y;            // [B, 1, first], [B, 1, second], or null
  float *out_x, *out_y, *new_recent;  // alike
};

// Exact attention of tiles of queries to some blocks of keys (sparse.hpp). What pairs, labels and bounds mean is said in
// kernels/sparse/torch.py. All tensors are dense; N tiles of C queries, J blocks of E keys, W blocks per tile, R rounds.
struct Sparse {
  int32_t threads, alike, rounds, round, skip_self;  // alike: all tiles have the same labels
  int32_t place_low, place_high, code_low, code_high;
  float scale;
  int64_t tiles, rows, blocks, keys, met, head_dim, value_dim;  // N, C, J, E, W, D, Dv
  const float *q, *k, *v;                   // [N, C, D], [J, E, D], [J, E, Dv]
  const int64_t* meets;                     // [N, W]; J: no block
  const int32_t *q_place, *k_place;         // [N, C], [J, E]; alike: [C], [W, E]
  const int32_t *q_code, *k_code;           // [N, C, R], [J, E, R], or null
  const uint8_t* alive;                     // [J, E], or null: all
  float* out;                               // [N, C, Dv] filled; for gradients read, or null: its part is in `shift`
  double* log_normaliser;                   // [N, C] filled; for gradients read
  const float* grad_out;                    // [N, C, Dv]; the rest of it are gradients, null in a forward
  const double* shift;                      // [N, C] gradient of the log-normaliser
  float *dq, *dk, *dv;                      // filled
};

// Which pages of keys queries choose (choice.hpp, kernels/sparse/choice.py). Dense; N lines, one for each sequence and key
// head, G query heads per line, P pages, W pages that a query chooses.
struct Choice {
  int32_t threads;
  int64_t rows, lines, groups, length, pages, head_dim, width;  // rows of candidates, N, G, T, P, D, W
  const float *q, *high, *low;  // [N, G, T, D], [N, P, D]
  const int64_t* candidates;    // [rows, T]; a row is for N / rows lines
  int64_t* chosen;              // [N, G, T, W] filled; P: none
};
