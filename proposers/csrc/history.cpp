// What the rollouts of a prompt say about the next token: history_law.py, fast.
//
// There is no index. A rollout is an array of int32; wherever the last token of the context stands in
// one, the match is followed backwards, past the rollout's first token into the prompt. Some ten
// thousand tokens are looked through in a few microseconds, which bounds the cost by `max_scanned`.
//
// Sums run in the order of the reference, so the two agree but for the rounding of pow.
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

struct Line {  // a rollout; history_rollouts.COLUMNS
  const int32_t* tokens;
  const float* chances;  // probability of each token when it was sampled; NaN: not known
  int64_t length, version, noise;
};

struct Prompt {
  const Line* lines;    // oldest first
  const int32_t* tail;  // the prompt's last tokens
  int32_t num_lines, tail_len;
};

struct Options {
  double decay, trust, sharpness, certain, least;  // of history_law.Options
  int32_t min_match, max_match, max_scanned, max_votes, max_ids;
};

struct Reader {  // the row that is drafted for
  int64_t version, noise;
  int32_t line;  // its own, -1: none
  int32_t draw;  // enum Draw
};

enum Draw { MODE, COUNTS, BEST };

namespace {

constexpr double ENOUGH = 1e-4;  // shorter matches are not asked once this much is left for them

struct Occurrence {
  int32_t token;
  double weight;
  float chance;
};

constexpr int BLOCK = 64;

// A bit for each of the first BLOCK of `num` tokens that is the one wanted.
inline uint64_t places_of(int32_t wanted, const int32_t* tokens, int64_t num) {
  uint64_t places = 0;
  if (num < BLOCK) {
    for (int i = 0; i < num; i++) places |= uint64_t(tokens[i] == wanted) << i;
    return places;
  }
#if defined(__AVX2__)
  const __m256i all = _mm256_set1_epi32(wanted);
  for (int i = 0; i < BLOCK; i += 8) {
    const __m256i some = _mm256_loadu_si256((const __m256i*)(tokens + i));
    const __m256 same = _mm256_castsi256_ps(_mm256_cmpeq_epi32(some, all));
    places |= uint64_t(uint32_t(_mm256_movemask_ps(same))) << i;
  }
#else
  for (int i = 0; i < BLOCK; i++) places |= uint64_t(tokens[i] == wanted) << i;
#endif
  return places;
}

struct Candidate {
  int32_t token, met;  // the how manieth it was
  double weight = 0;  // of its occurrences
  double known = 0;   // of those whose chance is known
  double roots = 0;     // sum of weight * sqrt(chance) over these
  double estimate = 0;  // b(w), then p_L(w)
  double probability = 0;
};

class Law {
 public:
  std::vector<Candidate> candidates;  // in the order in which they were met

  void look_up(const Prompt& prompt, const int32_t* context, int32_t length, const Reader& reader,
               const Options& options) {
    collect(prompt, context, length, reader, options);
    interpolate(options);
  }

 private:
  std::vector<std::vector<Occurrence>> found_;  // by match length, latest of the newest first
  std::vector<int32_t> slots_;  // open addressing: candidate + 1, 0: empty

  void collect(const Prompt& prompt, const int32_t* context, int32_t length, const Reader& reader,
               const Options& options) {
    found_.resize(options.max_match + 1);
    for (auto& found : found_) found.clear();
    length = std::min(length, options.max_match);
    int64_t scanned = 0;
    for (int32_t i = prompt.num_lines - 1; i >= 0 && scanned < options.max_scanned; i--) {
      const Line& line = prompt.lines[i];
      if (!line.length) continue;
      if (line.noise && line.noise == reader.noise && i != reader.line) continue;
      scanned += line.length;
      double weight = 1.0;
      if (options.decay != 1.0 && reader.version > line.version)
        weight = std::pow(options.decay, double(reader.version - line.version));
      search(prompt, line, context, length, weight, options);
    }
  }

  // Latest first.
  void search(const Prompt& prompt, const Line& line, const int32_t* context, int32_t length,
              double weight, const Options& options) {
    const int32_t last = context[length - 1];
    int64_t end = line.length - 1;  // tokens[end - 1] is the last that something follows
    for (; end > 0; end -= BLOCK) {
      const int64_t begin = std::max<int64_t>(0, end - BLOCK);
      uint64_t places = places_of(last, line.tokens + begin, line.length - begin);
      if (end < BLOCK) places &= (uint64_t(1) << end) - 1;
      while (places) {
        const int64_t place = 63 - std::countl_zero(places);
        places ^= uint64_t(1) << place;
        match(prompt, line, context, length, begin + place, weight, options);
      }
    }
    if (prompt.tail_len && prompt.tail[prompt.tail_len - 1] == last)
      match(prompt, line, context, length, -1, weight, options);
  }

  // The token at `at` (-1: the prompt's last) is the context's last one.
  void match(const Prompt& prompt, const Line& line, const int32_t* context, int32_t length,
             int64_t at, double weight, const Options& options) {
    int32_t matched = 1;
    while (matched < length) {
      const int64_t place = at - matched;
      int32_t token;
      if (place >= 0) {
        token = line.tokens[place];
      } else if (prompt.tail_len + 1 + place > 0) {
        token = prompt.tail[prompt.tail_len + place];
      } else {
        break;
      }
      if (token != context[length - 1 - matched]) break;
      matched++;
    }
    auto& found = found_[matched];
    if (matched >= options.min_match && found.size() < size_t(options.max_votes))
      found.push_back({line.tokens[at + 1], weight, line.chances[at + 1]});
  }

  Candidate& candidate(int32_t token) {
    const size_t mask = slots_.size() - 1;
    size_t slot = (uint32_t(token) * 2654435769u) & mask;
    while (slots_[slot]) {
      Candidate& one = candidates[slots_[slot] - 1];
      if (one.token == token) return one;
      slot = (slot + 1) & mask;
    }
    candidates.push_back({token, int32_t(candidates.size())});
    slots_[slot] = int32_t(candidates.size());
    return candidates.back();
  }

  void interpolate(const Options& options) {
    candidates.clear();
    size_t num = 0, size = 16;
    for (const auto& found : found_) num += found.size();
    while (size < 2 * num) size *= 2;
    slots_.assign(size, 0);
    double left = 1.0;  // what longer matches leave to shorter ones
    int32_t length = options.max_match;
    while (length >= options.min_match && left > ENOUGH) {
      for (const Occurrence& one : found_[length]) {
        Candidate& c = candidate(one.token);
        c.weight += one.weight;
        if (!std::isnan(one.chance)) {
          c.known += one.weight;
          c.roots += one.weight * std::sqrt(double(one.chance));
        }
      }
      int32_t shorter = length - 1;
      while (shorter >= options.min_match && found_[shorter].empty()) shorter--;
      if (!candidates.empty()) left *= spread(left, length - shorter, options.trust);
      length = shorter;
    }
  }

  // Adds what the occurrences so far say, `times` match lengths over; what remains of `left`.
  double spread(double left, int32_t times, double trust) {
    double total = 0, sum = 0, rest = 0, said = 0;
    for (const Candidate& c : candidates) total += c.weight;
    for (Candidate& c : candidates) {
      const double counted = c.weight / (total + double(candidates.size()));
      c.estimate = (c.roots + (c.weight - c.known) * counted) / c.weight;
      sum += c.estimate;
    }
    auto share = [sum](const Candidate& c) {
      const double others = sum - c.estimate;
      return others > 1.0 - c.estimate ? (1.0 - c.estimate) / others : 1.0;
    };
    for (const Candidate& c : candidates) rest += c.weight * share(c);
    for (Candidate& c : candidates) {
      const double trusted = (trust * c.known + (c.weight - c.known)) / c.weight;
      c.estimate *= trusted * (c.weight * (1.0 - share(c)) + rest) / total;
      said += c.estimate;
    }
    if (!(said > 0)) return 1.0;
    const double remains = std::pow(1.0 - said, double(times));
    const double factor = left * (1.0 - remains) / said;
    for (Candidate& c : candidates) c.probability += factor * c.estimate;
    return remains;
  }
};

thread_local Law law;

// The most probable candidates first, at most `max_ids`; of equals the one met first.
void rank(int32_t max_ids) {
  auto& all = law.candidates;
  auto before = [](const Candidate& a, const Candidate& b) {
    return a.probability != b.probability ? a.probability > b.probability : a.met < b.met;
  };
  if (all.size() > size_t(max_ids)) {
    std::nth_element(all.begin(), all.begin() + max_ids, all.end(), before);
    all.resize(max_ids);
  }
  std::sort(all.begin(), all.end(), before);
}

// q of the ranked candidates, in `probs`.
void sharpen(double sharpness, double* probs) {
  double total = 0;
  for (size_t i = 0; i < law.candidates.size(); i++) {
    const double p = law.candidates[i].probability;
    total += probs[i] = sharpness == 1.0 ? p : std::pow(p, sharpness);
  }
  for (size_t i = 0; i < law.candidates.size(); i++) probs[i] /= total;
}

}  // namespace

// Tokens that followed the context, by probability; how many. What is missing to 1 is unseen.
extern "C" int32_t eh_law(const Prompt* prompt, const Options* options, const Reader* reader,
                          const int32_t* context, int32_t length, int64_t* ids, double* probs) {
  law.look_up(*prompt, context, length, *reader, *options);
  rank(options->max_ids);
  for (size_t i = 0; i < law.candidates.size(); i++) {
    ids[i] = law.candidates[i].token;
    probs[i] = law.candidates[i].probability;
  }
  return int32_t(law.candidates.size());
}

// Adds named tokens behind the context until one is to be drawn: then the law to draw it from, of as
// many ids as are returned, and chances[num_points] of what is drawn. 0: the draft ends, for want of
// room, of a law or of a chance.
extern "C" int32_t eh_draft(const Prompt* prompt, const Options* options, const Reader* reader,
                            int32_t* context, int32_t length, int32_t room, double* chances,
                            int32_t* num_points, int64_t* ids, double* probs) {
  double reached = 1.0;  // the chance that all named so far are accepted
  for (int32_t& num = *num_points = 0; num < room && reached > options->least; num++) {
    const int32_t begin = std::max(0, length + num - options->max_match);
    const int32_t many = eh_law(prompt, options, reader, context + begin, length + num - begin, ids,
                                probs);
    if (!many) return 0;
    chances[num] = probs[0];
    if (reader->draw != MODE) {
      sharpen(reader->draw == BEST ? options->sharpness : 1.0, probs);
      if (reader->draw == COUNTS || probs[0] <= options->certain) {
        double most = 0, least = 0;
        for (int32_t i = 0; i < many; i++) {
          most += std::min(law.candidates[i].probability, probs[i]);
          least += law.candidates[i].probability * probs[i];
        }
        chances[num] = std::sqrt(most * least);
        return many;
      }
    }
    context[length + num] = int32_t(ids[0]);
    reached *= chances[num];
  }
  return 0;
}
