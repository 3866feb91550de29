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
  expect("keys no row sees", wrong);
}

}  // namespace

void check_rows() {
  for (Kind kind : {FORWARD, REVERSE, CROSS_ENTROPY, JS, HELLINGER}) {
    check_divergence<float>(kind, 3);
    check_divergence<double>(kind, 1);
  }
}
