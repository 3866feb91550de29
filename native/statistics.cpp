// What watching adds up: per head, sums over rows of the statistics a pass has made. One walk over the rows, in place
// of some sixty small tensor operations that would cost more than the pass itself.
#include <cmath>

#include "exp.h"
#include "kernels.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

using V = Vec<float>;
constexpr int SUMS = 11, BAND_SUMS = 5;
constexpr int MOST_BANDS = 64;  // the caller's number of bands is at most this
constexpr int AT_ONCE = 64;     // rows whose exponentials are taken together

// e^x where the walk looks at it; rows that are not finite give anything.
void exponentiate(float* x) {
  for (int i = 0; i < AT_ONCE; i += V::W)
    V::store(x + i, exp2_bounded<float>(bounded<float>(V::mul(V::load(x + i), V::set(static_cast<float>(LOG2E))))));
}

float dot(const float* a, const float* b, int64_t n) {
  V::T part = V::set(0);
  int64_t k = 0;
  for (; k + V::W <= n; k += V::W) part = V::fma(V::load(a + k), V::load(b + k), part);
  float sum = V::reduce_sum(part);
  for (; k < n; ++k) sum += a[k] * b[k];
  return sum;
}

// floor(log2 s) for s >= 1, from the exponent.
int octave(float s, int bands) {
  uint32_t bits;
  std::memcpy(&bits, &s, 4);
  const int e = static_cast<int>(bits >> 23) - 127;
  return e < bands ? e : bands - 1;
}

struct BandRun {  // sums over rows in the same band of visible keys, which mostly lie side by side
  int band = 0;
  double rows = 0, entropy = 0, normal = 0, width = 0, log_z = 0, variance = 0, sink = 0, largest = 0, seen = 0;
};

struct Head {
  double sums[SUMS] = {}, bands[BAND_SUMS][MOST_BANDS] = {};
  double single = 0, bad = 0, peak, length;
  double* histogram;
  float known = 2, log_known = std::log(2.0f);  // rows mostly see as many keys as the row before

  void take(BandRun& r, int next) {
    const double column[SUMS] = {r.rows,  0,          0,      r.entropy, r.normal, r.width,
                                 r.log_z, r.variance, r.sink, r.largest, r.seen};
    for (int c = 0; c < SUMS; ++c) sums[c] += column[c];
    const double inside[BAND_SUMS] = {r.rows, r.seen, r.width, r.normal, r.sink};
    for (int c = 0; c < BAND_SUMS; ++c) bands[c][r.band] += inside[c];
    r = BandRun{};
    r.band = next;
  }
};

// Rows [i, i + n) of batch entry b.
void add_rows(const PartitaStatistics& t, int64_t b, int64_t head, int64_t i, int64_t n, Head& h) {
  const int64_t at = (b * t.heads + head) * t.rows + i;
  const float *seen = t.visible + at, *entropy = t.entropy + at, *log_z = t.log_z + at, *top = t.top + at;
  alignas(64) float width[AT_ONCE] = {}, largest[AT_ONCE] = {}, sink[AT_ONCE] = {};
  for (int64_t r = 0; r < n; ++r) {
    width[r] = entropy[r];
    largest[r] = top[r] - log_z[r];
  }
  exponentiate(width);
  exponentiate(largest);
  if (t.sink && t.sink_is_score) {
    for (int64_t r = 0; r < n; ++r) sink[r] = t.sink[at + r] - log_z[r];
    exponentiate(sink);
  } else if (t.sink) {
    std::memcpy(sink, t.sink + at, sizeof(float) * static_cast<size_t>(n));
  } else {
    const float scale = static_cast<float>(t.scale);
    const float* query = t.query + b * t.query_batch + head * t.query_head + i * t.query_row;
    const float* key = t.key + b * t.key_batch + head * t.key_head;
    for (int64_t r = 0; r < n; ++r) sink[r] = scale * dot(query + r * t.query_row, key, t.dim) - log_z[r];
    exponentiate(sink);
  }
  BandRun run;
  run.band = octave(h.known, t.bands);
  for (int64_t r = 0; r < n; ++r) {
    const float s = seen[r];
    if (!(s > 0) || (t.keep && !t.keep[b * t.rows + i + r])) continue;
    h.length = s > h.length ? s : h.length;
    if (!std::isfinite(log_z[r]) || !std::isfinite(entropy[r]) || !std::isfinite(top[r])) {
      h.bad += 1;
      continue;
    }
    h.peak = top[r] > h.peak ? top[r] : h.peak;
    if (s < 2) {
      h.single += 1;
      continue;
    }
    if (s != h.known) {
      h.log_known = std::log(h.known = s);
      if (const int band = octave(s, t.bands); band != run.band) h.take(run, band);
    }
    const float normal = entropy[r] / h.log_known;
    const int bin =
        normal > 0 ? static_cast<int>(normal < 2 ? normal * static_cast<float>(t.bins) : static_cast<float>(t.bins))
                   : 0;
    h.histogram[bin < t.bins ? bin : t.bins - 1] += 1;
    run.rows += 1;
    run.entropy += entropy[r];
    run.normal += normal;
    run.width += width[r];
    run.log_z += log_z[r];
    run.variance += t.variance[at + r];
    run.sink += sink[r];
    run.largest += largest[r];
    run.seen += s;
  }
  h.take(run, run.band);
}

void add_head(const PartitaStatistics& t, int64_t head) {
  Head h;
  h.peak = t.peak[head];
  h.length = t.length[head];
  h.histogram = t.histogram + head * t.bins;
  for (int64_t b = 0; b < t.batch; ++b)
    for (int64_t i = 0; i < t.rows; i += AT_ONCE)
      add_rows(t, b, head, i, t.rows - i < AT_ONCE ? t.rows - i : AT_ONCE, h);
  h.sums[1] = h.single;
  h.sums[2] = h.bad;
  for (int c = 0; c < SUMS; ++c) t.sums[c * t.heads + head] += h.sums[c];
  for (int c = 0; c < BAND_SUMS; ++c)
    for (int i = 0; i < t.bands; ++i) t.band_sums[(c * t.heads + head) * t.bands + i] += h.bands[c][i];
  t.peak[head] = h.peak;
  t.length[head] = h.length;
}

}  // namespace

void accumulate_statistics(const PartitaStatistics& t) {
#pragma omp parallel for num_threads(t.threads) schedule(dynamic, 1)
  for (int64_t head = 0; head < t.heads; ++head) add_head(t, head);
}

}  // namespace PARTITA_ISA
}  // namespace partita
