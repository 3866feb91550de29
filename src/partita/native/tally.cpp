// What watching adds up: per head, sums over rows of the statistics a pass has made. One walk over the rows, in place of
// some sixty small tensor operations that would cost more than the pass itself. Plain code: the time goes to the library's
// exponentials.
#include <cmath>

#include "problem.h"

namespace partita {

namespace {

constexpr int SUMS = 11, BINS = 256, BANDS = 24, BAND_SUMS = 5;

// <query_i, key_0>, in eight chains so that it can be done in vectors.
float dot(const float* a, const float* b, int64_t n) {
  float part[8] = {};
  int64_t k = 0;
  for (; k + 8 <= n; k += 8)
    for (int i = 0; i < 8; ++i) part[i] += a[k + i] * b[k + i];
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += part[i];
  for (; k < n; ++k) sum += a[k] * b[k];
  return sum;
}

void add_head(const PartitaTally& t, int64_t head) {
  double sums[SUMS] = {}, bands[BAND_SUMS][BANDS] = {};
  double peak = t.peak[head], length = t.length[head];
  double* histogram = t.histogram + head * BINS;
  float known = 2, log_known = std::log(2.0f);  // rows mostly see as many keys as the row before
  for (int64_t b = 0; b < t.batch; ++b) {
    const int64_t base = (b * t.heads + head) * t.rows;
    const float* key = t.key ? t.key + b * t.key_batch + head * t.key_head : nullptr;
    for (int64_t i = 0; i < t.rows; ++i) {
      const int64_t at = base + i;
      const float seen = t.visible[at], entropy = t.entropy[at], log_z = t.log_z[at], top = t.top[at];
      if (!(seen > 0) || (t.keep && !t.keep[b * t.rows + i])) continue;
      length = seen > length ? seen : length;
      if (!std::isfinite(log_z) || !std::isfinite(entropy) || !std::isfinite(top)) {
        sums[2] += 1;
        continue;
      }
      peak = top > peak ? top : peak;
      if (seen < 2) {
        sums[1] += 1;
        continue;
      }
      if (seen != known) log_known = std::log(known = seen);
      float sink;
      if (key)
        sink = std::exp(t.scale * dot(t.query + b * t.query_batch + head * t.query_head + i * t.query_row, key, t.dim) - log_z);
      else
        sink = t.sink[at];
      const float normal = entropy / log_known, width = std::exp(entropy);
      const double column[SUMS] = {1, 0, 0, entropy, normal, width, log_z, t.variance[at], sink, std::exp(top - log_z), seen};
      for (int c = 0; c < SUMS; ++c) sums[c] += column[c];
      const int bin = normal > 0 ? static_cast<int>(normal < 2 ? normal * BINS : BINS) : 0;
      histogram[bin < BINS ? bin : BINS - 1] += 1;
      const int octave = std::ilogb(seen), band = octave < BANDS ? octave : BANDS - 1;
      const double inside[BAND_SUMS] = {1, seen, width, normal, sink};
      for (int c = 0; c < BAND_SUMS; ++c) bands[c][band] += inside[c];
    }
  }
  for (int c = 0; c < SUMS; ++c) t.sums[c * t.heads + head] += sums[c];
  for (int c = 0; c < BAND_SUMS; ++c)
    for (int i = 0; i < BANDS; ++i) t.bands[(c * t.heads + head) * BANDS + i] += bands[c][i];
  t.peak[head] = peak;
  t.length[head] = length;
}

}  // namespace

void tally(const PartitaTally& t) {
#pragma omp parallel for num_threads(t.threads) schedule(dynamic, 1)
  for (int64_t head = 0; head < t.heads; ++head) add_head(t, head);
}

}  // namespace partita
