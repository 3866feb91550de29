// Rows of explicit scores of two distributions, and the sums that watching keeps.
#include <cstring>

#include "check.h"

namespace {

enum Kind { FORWARD, REVERSE, CROSS_ENTROPY, JS, HELLINGER };
const char* const KINDS[] = {"forward KL", "reverse KL", "cross entropy", "Jensen-Shannon", "Hellinger"};

// Divergence of one row in type T and its gradients with respect to both rows of scores.
template <class T>
struct Pair {
  std::vector<T> p, q, a, b, dp, dq;  // probabilities, their logarithms, gradients
  T value = 0;

  static void normalise(const std::vector<T>& score, std::vector<T>& prob, std::vector<T>& log_prob) {
    const T top = *std::max_element(score.begin(), score.end());
    T mass = 0;
    for (T s : score) mass += std::exp(s - top);
    for (T s : score) {
      log_prob.push_back(s - top - std::log(mass));
      prob.push_back(std::exp(log_prob.back()));
    }
  }

  Pair(Kind kind, const std::vector<T>& s, const std::vector<T>& t, T beta) {
    normalise(s, p, a);
    normalise(t, q, b);
    const size_t n = s.size();
    std::vector<T> x(n), y(n);  // p and q times the derivatives of the value with respect to them
    T level = 0, other = 0;
    for (size_t j = 0; j < n; ++j) {
      T term = 0;
      switch (kind) {
        case FORWARD: x[j] = term = p[j] * (a[j] - b[j]), y[j] = -p[j]; break;
        case REVERSE: x[j] = -q[j], y[j] = term = q[j] * (b[j] - a[j]); break;
        case CROSS_ENTROPY: x[j] = term = -p[j] * b[j], y[j] = -p[j]; break;
        case JS: {
          const T m = std::log(beta * p[j] + (1 - beta) * q[j]);
          x[j] = beta * p[j] * (a[j] - m), y[j] = (1 - beta) * q[j] * (b[j] - m);
          term = x[j] + y[j];
          break;
        }
        case HELLINGER: x[j] = y[j] = -std::sqrt(p[j] * q[j]) / 2, term = 2 * x[j]; break;
      }
      value += term, level += x[j], other += y[j];
    }
    for (size_t j = 0; j < n; ++j) dp.push_back(x[j] - p[j] * level), dq.push_back(y[j] - q[j] * other);
  }
};

template <class A>
void check_divergence(Kind kind, int32_t threads) {
  const int64_t rows = 21, cols = 307, row = 320;
  std::printf("divergence, %s, %s, %d threads\n", KINDS[kind], sizeof(A) == 4 ? "float32" : "float64", int(threads));
  std::mt19937 source(31);
  std::vector<A> p = drawn<A>(source, rows * row), q = drawn<A>(source, rows * row), bias = drawn<A>(source, cols);
  std::vector<A> weight = drawn<A>(source, rows), record(6 * rows), p_given = p, q_given = q;
  std::vector<int32_t> start, stop;
  for (int64_t i = 0; i < rows; ++i)
    start.push_back(static_cast<int32_t>(i)), stop.push_back(static_cast<int32_t>(cols - 2 * i));
  const A beta = A(0.25);
  PartitaDivergenceRows d{};
  d.rows = rows, d.cols = cols, d.p_row = d.q_row = row, d.record_row = rows;
  d.dtype = sizeof(A) == 4 ? PARTITA_FLOAT32 : PARTITA_FLOAT64, d.threads = threads, d.kind = kind;
  d.p_gradient = d.q_gradient = 1, d.beta = beta, d.p = p.data(), d.q = q.data(), d.q_bias = bias.data();
  d.p_start = d.q_start = start.data(), d.p_stop = d.q_stop = stop.data();
  d.weight = weight.data(), d.record = record.data();
  failures += partita_divergence_rows(&d) != 0;

  Error<A> value, p_gradient, q_gradient;
  int64_t wrong = 0;
  for (int64_t i = 0; i < rows; ++i) {
    std::vector<Exact> s, t;
    std::vector<A> s_plain, t_plain;
    for (int64_t j = start[i]; j < stop[i]; ++j) {
      s.push_back(p_given[i * row + j]), t.push_back(Exact(q_given[i * row + j]) + bias[j]);
      s_plain.push_back(p_given[i * row + j]), t_plain.push_back(q_given[i * row + j] + bias[j]);
    }
    const Pair<Exact> exact(kind, s, t, beta);
    const Pair<A> plain(kind, s_plain, t_plain, beta);
    const Exact first = record[4 * rows + i], second = record[5 * rows + i];
    value.add(exact.value, kind == REVERSE ? second : kind >= JS ? first + second : first, plain.value);
    for (int64_t j = 0; j < cols; ++j) {
      const bool seen = j >= start[i] && j < stop[i];
      if (!seen) wrong += p[i * row + j] != 0 || q[i * row + j] != 0;
      if (!seen) continue;
      const int64_t k = j - start[i];
      p_gradient.add(weight[i] * exact.dp[k], p[i * row + j], weight[i] * plain.dp[k]);
      q_gradient.add(weight[i] * exact.dq[k], q[i * row + j], weight[i] * plain.dq[k]);
    }
  }
  value.hold("value", cols), p_gradient.hold("gradient of the first", cols);
  q_gradient.hold("gradient of the second", cols);
  expect("keys nobody sees", wrong);
}

// Long for the same reason as `check_pass`: one call, told in order.
void check_statistics() {
  constexpr int64_t BATCH = 2, HEADS = 3, ROWS = 150, DIM = 20;
  constexpr int BINS = 10, BANDS = 12, SUMS = 11;
  std::printf("statistics of %d heads\n", int(HEADS));
  std::mt19937 source(37);
  const size_t n = BATCH * HEADS * ROWS;
  std::vector<float> entropy = drawn<float>(source, n), log_z = drawn<float>(source, n), top = log_z, visible(n);
  std::vector<float> variance = drawn<float>(source, n), query = drawn<float>(source, n * DIM);
  std::vector<float> key = drawn<float>(source, BATCH * HEADS * DIM);
  std::vector<uint8_t> keep(BATCH * ROWS, 1);
  for (size_t r = 0; r < n; ++r) {
    visible[r] = static_cast<float>(r % ROWS);  // 0: no such row; 1: nothing to spread over
    entropy[r] = std::min(std::abs(entropy[r]), std::log(std::max(1.0f, visible[r])));
    top[r] -= std::abs(variance[r]);
    log_z[r] += 5;  // so that key 0 has no more than all
  }
  keep[17] = 0;
  entropy[40] = std::numeric_limits<float>::quiet_NaN();
  std::vector<double> sums(SUMS * HEADS), peak(HEADS, -1e30), length(HEADS), histogram(HEADS * BINS);
  std::vector<double> bands(5 * HEADS * BANDS);
  PartitaStatistics t{};
  t.batch = BATCH, t.heads = HEADS, t.rows = ROWS, t.dim = DIM, t.threads = 2, t.bins = BINS, t.bands = BANDS;
  t.scale = 0.3, t.entropy = entropy.data(), t.log_z = log_z.data(), t.variance = variance.data(), t.top = top.data();
  t.visible = visible.data(), t.query = query.data(), t.key = key.data();
  t.query_batch = HEADS * ROWS * DIM, t.query_head = ROWS * DIM, t.query_row = DIM;
  t.key_batch = HEADS * DIM, t.key_head = DIM, t.keep = keep.data();
  t.sums = sums.data(), t.peak = peak.data(), t.length = length.data(), t.histogram = histogram.data();
  t.band_sums = bands.data();
  failures += partita_statistics(&t) != 0;

  Error<float> held[SUMS];
  int64_t wrong = 0;
  for (int64_t h = 0; h < HEADS; ++h) {
    Exact exact[SUMS] = {};
    double plain[SUMS] = {}, in_bands = 0, in_bins = 0, highest = -1e30;
    for (int64_t b = 0; b < BATCH; ++b)
      for (int64_t i = 0; i < ROWS; ++i) {
        const int64_t r = (b * HEADS + h) * ROWS + i;
        if (visible[r] < 1 || !keep[b * ROWS + i]) continue;
        if (std::isnan(entropy[r])) {
          exact[2] += 1, plain[2] += 1;
          continue;
        }
        highest = std::max(highest, double(top[r]));
        if (visible[r] < 2) {
          exact[1] += 1, plain[1] += 1;
          continue;
        }
        Exact dot = 0;
        float rough = 0;
        for (int64_t d = 0; d < DIM; ++d) {
          dot += Exact(query[r * DIM + d]) * key[(b * HEADS + h) * DIM + d];
          rough += query[r * DIM + d] * key[(b * HEADS + h) * DIM + d];
        }
        const Exact row[SUMS] = {1,
                                 0,
                                 0,
                                 entropy[r],
                                 entropy[r] / std::log(Exact(visible[r])),
                                 std::exp(Exact(entropy[r])),
                                 log_z[r],
                                 variance[r],
                                 std::exp(Exact(0.3f) * dot - log_z[r]),
                                 std::exp(Exact(top[r]) - log_z[r]),
                                 visible[r]};
        const float near[SUMS] = {1,
                                  0,
                                  0,
                                  entropy[r],
                                  entropy[r] / std::log(visible[r]),
                                  std::exp(entropy[r]),
                                  log_z[r],
                                  variance[r],
                                  std::exp(0.3f * rough - log_z[r]),
                                  std::exp(top[r] - log_z[r]),
                                  visible[r]};
        for (int s = 0; s < SUMS; ++s) exact[s] += row[s], plain[s] += near[s];
      }
    for (int s = 0; s < SUMS; ++s) held[s].add(exact[s], sums[s * HEADS + h], plain[s]);
    for (int k = 0; k < BANDS; ++k) in_bands += bands[h * BANDS + k];
    for (int k = 0; k < BINS; ++k) in_bins += histogram[h * BINS + k];
    wrong += in_bands != double(exact[0]) || in_bins != double(exact[0]) || peak[h] != highest || length[h] != ROWS - 1;
    for (int s : {0, 1, 2, 10}) wrong += sums[s * HEADS + h] != double(exact[s]);
  }
  const char* names[SUMS] = {"rows",  "single",   "bad",           "entropy",        "normal entropy", "width",
                             "log Z", "variance", "mass on key 0", "largest weight", "visible"};
  for (int s : {3, 4, 5, 6, 7, 8, 9}) held[s].hold(names[s], BATCH * ROWS);
  expect("counts, bands, histogram, largest", wrong);
}

}  // namespace

void check_rows() {
  for (Kind kind : {FORWARD, REVERSE, CROSS_ENTROPY, JS, HELLINGER}) {
    check_divergence<float>(kind, 3);
    check_divergence<double>(kind, 1);
  }
  check_statistics();
}
