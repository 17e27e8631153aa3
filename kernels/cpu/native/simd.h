// Sixteen float lanes: one AVX-512 register, or a pair of AVX2 ones. All that the kernels know of an
// instruction set is here.
#pragma once
#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;
enum class E4m3 : uint8_t {};

enum { PANEL = 16 };  // lanes, and all that is counted by them
enum { LINE = 64 };   // bytes of a cache line

static inline void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // second cache
static inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

static inline bf16 to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)(bits >> 16 | 0x40);
  return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float exact(E4m3 x) { return _cvtsh_ss((uint16_t)((int8_t)x * 128 & 0xbf80)) * 0x1p8f; }

static inline float from_bf16(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

#if defined(__AVX512F__)

enum { MAX_ROWS = 12, TILE_PANELS = 2 };  // of a tile: its sums take 24 of 32 registers
enum { FEW_ROWS = 6, FEW_PANELS = 4 };    // of one that waits for memory: more of it under way at once

struct Lanes {
  __m512 v;
};

static inline Lanes zero() { return {_mm512_setzero_ps()}; }
static inline Lanes all(float x) { return {_mm512_set1_ps(x)}; }
static inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
static inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline float sum(Lanes a) { return _mm512_reduce_add_ps(a.v); }
static inline float largest(Lanes a) { return _mm512_reduce_max_ps(a.v); }

// The first `count` lanes of a, the others `rest`.
static inline Lanes first(int count, Lanes a, Lanes rest) {
  __mmask16 mask = count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
  return {_mm512_mask_blend_ps(mask, rest.v, a.v)};
}
// Zero where a is less, or a; of NaN it is NaN.
static inline Lanes no_less(float least, Lanes a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, _mm512_set1_ps(least), _CMP_NLT_UQ), a.v)};
}

static inline Lanes nearest(Lanes x) {  // whole number
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline Lanes scaled(Lanes x, Lanes power) { return {_mm512_scalef_ps(x.v, power.v)}; }  // x * 2^power, a whole one

#ifdef __AVX512BF16__
static inline void store_bf16(bf16* p, Lanes a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
#else
static inline void store_bf16(bf16* p, Lanes a) {
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
}
#endif

// Of sixteen pairs of bf16 the first ones, and the second ones, as floats.
static inline Lanes firsts(const void* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
static inline Lanes seconds(const void* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)))};
}

// Sixteen int8 as floats.
static inline Lanes from_bytes(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

// The nearest int8, ties to even; what is beyond them is the furthest one.
static inline void store_bytes(int8_t* p, Lanes a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
static inline Lanes absolute(Lanes a) { return {_mm512_abs_ps(a.v)}; }

// Sixteen e4m3, each 2^-8 of what it is: a half with the same bits, smallest numbers included. NaN is a number, too.
static inline Lanes from_e4m3(const E4m3* p) {
  __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return {_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xbf80)))};
}
// The nearest e4m3, ties to even, of numbers up to 448.
static inline void store_e4m3(E4m3* p, Lanes a) {
  __m512i bits = _mm512_castps_si512(a.v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
  rounded = _mm512_sub_epi32(_mm512_srli_epi32(_mm512_slli_epi32(rounded, 1), 21), _mm512_set1_epi32(120 << 3));
  __m512 furthest = _mm512_abs_ps(a.v);
  __mmask16 small = _mm512_cmp_ps_mask(furthest, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
  rounded = _mm512_mask_mov_epi32(rounded, small, _mm512_cvtps_epi32(_mm512_mul_ps(furthest, _mm512_set1_ps(512))));
  __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(bits, 31), 7);
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_or_si512(rounded, sign)));
}

// By the Walsh-Hadamard matrix of sixteen: of pairs of lanes that lie 1, 2, 4 and 8 apart sums and differences.
static inline Lanes mixed(Lanes a) {
  __m512 x = a.v, y = _mm512_permute_ps(x, 0xb1);
  x = _mm512_mask_sub_ps(_mm512_add_ps(x, y), 0xaaaa, y, x), y = _mm512_permute_ps(x, 0x4e);
  x = _mm512_mask_sub_ps(_mm512_add_ps(x, y), 0xcccc, y, x), y = _mm512_shuffle_f32x4(x, x, 0xb1);
  x = _mm512_mask_sub_ps(_mm512_add_ps(x, y), 0xf0f0, y, x), y = _mm512_shuffle_f32x4(x, x, 0x4e);
  return {_mm512_mask_sub_ps(_mm512_add_ps(x, y), 0xff00, y, x)};
}

// Numbers of 4 bits, each stored 8 more. Of sixteen words at p that of the bits from 0, from 8, from 4 and from 12. Of eight
// words those from 0, and from 8; behind them, as eight more lanes, those from 4, and from 12.
static inline Lanes less_8(__m512i words) {  // of each lane's lower four bits
  const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm512_permutexvar_ps(words, numbers)};
}
struct TwoNumbers {
  Lanes first, second;
};
struct FourNumbers {
  Lanes first, second, third, fourth;
};
static inline FourNumbers numbers_of_words(const void* p) {
  __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {less_8(words), less_8(_mm512_srli_epi32(words, 8)), less_8(_mm512_srli_epi32(words, 4)),
          less_8(_mm512_srli_epi32(words, 12))};
}
static inline TwoNumbers numbers_of_half(const void* p) {
  __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(words), _mm256_srli_epi32(words, 4), 1);
  return {less_8(both), less_8(_mm512_srli_epi32(both, 8))};
}

// Sixteen halves as floats.
static inline Lanes from_halves(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }

enum { E4M3_STEP = 4 };
// Sum + the products of so many numbers of a row and columns of e4m3, pairs [E4M3_STEP / 2][16][2], each 2^-8 of what it is.
static inline Lanes dot_e4m3(const float* row, const E4m3* p, Lanes sum) {
  __m512i pairs = _mm512_loadu_si512(p), kept = _mm512_set1_epi16((short)0xbf80);  // as in `from_e4m3`
  __m512i first = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(pairs, 8), 1), kept);
  __m512i second = _mm512_and_si512(_mm512_srai_epi16(pairs, 1), kept);
  sum = fma(all(row[0]), {_mm512_cvtph_ps(_mm512_castsi512_si256(first))}, sum);
  sum = fma(all(row[1]), {_mm512_cvtph_ps(_mm512_castsi512_si256(second))}, sum);
  sum = fma(all(row[2]), {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(first, 1))}, sum);
  return fma(all(row[3]), {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(second, 1))}, sum);
}

#ifdef __AVX512BF16__
struct Pairs {  // sixteen pairs of bf16
  __m512bh v;
};
static inline Pairs load_pairs(const void* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
// The sixteen int8 at p, and those behind them, exactly: of such a float the lower half is zeros.
static inline Pairs pairs_of_bytes(const int8_t* p) {
  __m512i first = _mm512_castps_si512(from_bytes(p).v), second = _mm512_castps_si512(from_bytes(p + PANEL).v);
  return {(__m512bh)_mm512_or_si512(_mm512_srli_epi32(first, 16), second)};
}
static inline Pairs pairs_of_e4m3(const E4m3* p) {  // likewise
  __m512i first = _mm512_castps_si512(from_e4m3(p).v), second = _mm512_castps_si512(from_e4m3(p + PANEL).v);
  return {(__m512bh)_mm512_or_si512(_mm512_srli_epi32(first, 16), second)};
}
// c + a.first * b.first + a.second * b.second; `a` is one pair for all lanes.
static inline Lanes dot_pairs(const bf16* a, Pairs b, Lanes c) {
  int pair;
  __builtin_memcpy(&pair, a, 4);
  return {_mm512_dpbf16_ps(c.v, (__m512bh)_mm512_set1_epi32(pair), b.v)};
}
// As numbers_of_words and numbers_of_half, in pairs.
static inline Pairs pairs_less_8(__m512i words) {  // of each word's lower four bits; the fifth is looked at, too
  const __m512i bf16s = _mm512_set_epi16(
      0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, (short)0xbf80, (short)0xc000, (short)0xc040,
      (short)0xc080, (short)0xc0a0, (short)0xc0c0, (short)0xc0e0, (short)0xc100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040,
      0x4000, 0x3f80, 0, (short)0xbf80, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0a0, (short)0xc0c0,
      (short)0xc0e0, (short)0xc100);
  return {(__m512bh)_mm512_permutexvar_epi16(words, bf16s)};
}
struct TwoPairs {
  Pairs first, second;
};
static inline TwoPairs pairs_of_words(const void* p) {
  __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
  return {pairs_less_8(bytes), pairs_less_8(_mm512_srli_epi16(bytes, 4))};
}
static inline Pairs pairs_of_half(const void* p) {
  __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  return pairs_less_8(_mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1));
}
#endif

// Whole numbers of 16 bits to p.
static inline void store_shorts(int16_t* p, Lanes x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

struct Shorts {  // sixteen pairs of int16
  __m512i v;
};
static inline Shorts shorts_of_bytes(const int8_t* p) {  // 32 of them
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))};
}
// Of 32 bytes the lower nibbles, and the upper ones.
struct TwoShorts {
  Shorts first, second;
};
static inline TwoShorts shorts_of_nibbles(const uint8_t* p) {
  __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
  return {{_mm512_and_si512(bytes, _mm512_set1_epi16(15))}, {_mm512_srli_epi16(bytes, 4)}};
}

// Of sixteen bytes, of up to 127, each with 128 times itself.
static inline Shorts shorts_of_zeros(const uint8_t* p) {
  __m512i zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return {_mm512_or_si512(zeros, _mm512_slli_epi32(zeros, 16 + 7))};
}

// The first `count` floats at p, then `rest`; nothing beyond is read.
static inline Lanes part(const float* p, int count, float rest) {
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(rest), (__mmask16)((1u << count) - 1), p)};
}
static inline bool ordered(Lanes a) { return !_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }  // no NaN
static inline unsigned at_least(Lanes a, float x) { return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(x), _CMP_GE_OQ); }

// x = m * 2^e with m in [sqrt(1/2), sqrt(2)), for normal x > 0; returns e.
static inline Lanes exponent(Lanes x, Lanes* m) {
  __m512i bits = _mm512_sub_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x3f3504f3));
  __m512i e = _mm512_srai_epi32(bits, 23);
  m->v = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(x.v), _mm512_slli_epi32(e, 23)));
  return {_mm512_cvtepi32_ps(e)};
}

struct Words {  // sixteen uint32
  __m512i v;
};

static inline Words words(uint32_t x) { return {_mm512_set1_epi32((int)x)}; }
static inline Words load_words(const int* p) { return {_mm512_loadu_si512(p)}; }
// c + a.first * b.first + a.second * b.second; `a` is one pair for all lanes.
static inline Words dot_pairs(const int16_t* a, Shorts b, Words c) {
  int pair;
  __builtin_memcpy(&pair, a, 4);
#ifdef __AVX512VNNI__
  return {_mm512_dpwssd_epi32(c.v, _mm512_set1_epi32(pair), b.v)};
#else
  return {_mm512_add_epi32(c.v, _mm512_madd_epi16(_mm512_set1_epi32(pair), b.v))};
#endif
}
#ifdef __AVX512VNNI__
// c + the four products of a and b; `a` is four numbers for all lanes, of b each lane has four.
static inline Words dot_fours(const int8_t* a, const uint8_t* b, Words c) {
  int four;
  __builtin_memcpy(&four, a, 4);
  return {_mm512_dpbusd_epi32(c.v, _mm512_loadu_si512(b), _mm512_set1_epi32(four))};
}
#endif
static inline Words exclusive(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
static inline Words shift_right(Words a, int by) { return {_mm512_srli_epi32(a.v, by)}; }
static inline Lanes to_float(Words a) { return {_mm512_cvtepi32_ps(a.v)}; }  // of int32
static inline Words multiply(Words a, uint32_t b, Words* high) {  // returns the low halves
  __m512i factor = _mm512_set1_epi32((int)b);
  __m512i even = _mm512_mul_epu32(a.v, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), factor);
  high->v = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
  return {_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32))};
}
// Of each lane, a where (which & 3) == number, else b.
static inline Words chosen(Words which, int number, Words a, Words b) {
  __mmask16 mask = _mm512_cmpeq_epi32_mask(_mm512_and_si512(which.v, _mm512_set1_epi32(3)), _mm512_set1_epi32(number));
  return {_mm512_mask_mov_epi32(b.v, mask, a.v)};
}

#else  // AVX2 and FMA

enum { MAX_ROWS = 6, TILE_PANELS = 1 };  // of a tile: its sums take 12 of 16 registers
enum { FEW_ROWS = 2, FEW_PANELS = 2 };

struct Lanes {
  __m256 a, b;
};

static inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Lanes x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline Lanes add(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline Lanes sub(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline Lanes mul(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline Lanes div(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline Lanes fma(Lanes x, Lanes y, Lanes z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline Lanes max(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline Lanes min(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline float sum(Lanes x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float largest(Lanes x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

static inline Lanes first(int count, Lanes x, Lanes rest) {
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i limit = _mm256_set1_epi32(count);
  const __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
  return {_mm256_blendv_ps(rest.a, x.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, low))),
          _mm256_blendv_ps(rest.b, x.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, high)))};
}
static inline Lanes no_less(float least, Lanes x) {
  const __m256 limit = _mm256_set1_ps(least);
  return {_mm256_and_ps(x.a, _mm256_cmp_ps(x.a, limit, _CMP_NLT_UQ)), _mm256_and_ps(x.b, _mm256_cmp_ps(x.b, limit, _CMP_NLT_UQ))};
}

static inline __m256 half_nearest(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Lanes nearest(Lanes x) { return {half_nearest(x.a), half_nearest(x.b)}; }
static inline __m256 half_scaled(__m256 x, __m256 power) {
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
static inline Lanes scaled(Lanes x, Lanes power) { return {half_scaled(x.a, power.a), half_scaled(x.b, power.b)}; }

static inline __m128i half_bf16(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
static inline void store_bf16(bf16* p, Lanes x) {
  _mm_storeu_si128((__m128i*)p, half_bf16(x.a));
  _mm_storeu_si128((__m128i*)(p + 8), half_bf16(x.b));
}

static inline Lanes firsts(const void* p) {
  const __m256i* q = (const __m256i*)p;
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
static inline Lanes seconds(const void* p) {
  const __m256i* q = (const __m256i*)p;
  const __m256i high = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), high)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), high))};
}

static inline Lanes from_bytes(const int8_t* p) {
  __m128i all = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}

static inline void store_bytes(int8_t* p, Lanes x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  words = _mm256_permute4x64_epi64(words, 0xd8);  // packing went by halves
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
static inline Lanes absolute(Lanes x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}

static inline Lanes from_e4m3(const E4m3* p) {
  __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  words = _mm256_and_si256(words, _mm256_set1_epi16((short)0xbf80));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
}
static inline __m256i half_e4m3(__m256 x) {
  __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff)));
  rounded = _mm256_sub_epi32(_mm256_srli_epi32(_mm256_slli_epi32(rounded, 1), 21), _mm256_set1_epi32(120 << 3));
  __m256 furthest = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
  __m256i small = _mm256_castps_si256(_mm256_cmp_ps(furthest, _mm256_set1_ps(0x1p-6f), _CMP_LT_OQ));
  rounded = _mm256_blendv_epi8(rounded, _mm256_cvtps_epi32(_mm256_mul_ps(furthest, _mm256_set1_ps(512))), small);
  return _mm256_or_si256(rounded, _mm256_slli_epi32(_mm256_srli_epi32(bits, 31), 7));
}
static inline void store_e4m3(E4m3* p, Lanes x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(half_e4m3(x.a), half_e4m3(x.b)), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

static inline __m256 half_mixed(__m256 x) {
  __m256 y = _mm256_permute_ps(x, 0xb1);
  x = _mm256_blend_ps(_mm256_add_ps(x, y), _mm256_sub_ps(y, x), 0xaa), y = _mm256_permute_ps(x, 0x4e);
  x = _mm256_blend_ps(_mm256_add_ps(x, y), _mm256_sub_ps(y, x), 0xcc), y = _mm256_permute2f128_ps(x, x, 1);
  return _mm256_blend_ps(_mm256_add_ps(x, y), _mm256_sub_ps(y, x), 0xf0);
}
static inline Lanes mixed(Lanes x) {
  __m256 a = half_mixed(x.a), b = half_mixed(x.b);
  return {_mm256_add_ps(a, b), _mm256_sub_ps(a, b)};
}

static inline __m256 half_less_8(__m256i words) {
  __m256i numbers = _mm256_and_si256(words, _mm256_set1_epi32(15));
  return _mm256_sub_ps(_mm256_cvtepi32_ps(numbers), _mm256_set1_ps(8));
}
struct TwoNumbers {
  Lanes first, second;
};
struct FourNumbers {
  Lanes first, second, third, fourth;
};
static inline Lanes less_8(__m256i a, __m256i b, int from) {
  return {half_less_8(_mm256_srli_epi32(a, from)), half_less_8(_mm256_srli_epi32(b, from))};
}
static inline FourNumbers numbers_of_words(const void* p) {
  const __m128i* q = (const __m128i*)p;
  __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128(q)), b = _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1));
  return {less_8(a, b, 0), less_8(a, b, 8), less_8(a, b, 4), less_8(a, b, 12)};
}
static inline TwoNumbers numbers_of_half(const void* p) {
  __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), b = _mm256_srli_epi32(a, 4);
  return {less_8(a, b, 0), less_8(a, b, 8)};
}

static inline Lanes from_halves(const uint16_t* p) {
  __m256i all = _mm256_loadu_si256((const __m256i*)p);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(all)), _mm256_cvtph_ps(_mm256_extracti128_si256(all, 1))};
}

enum { E4M3_STEP = 2 };
static inline Lanes from_upper_e4m3(__m256i words) {
  __m256i halves = _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16((short)0xbf80));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
static inline Lanes dot_e4m3(const float* row, const E4m3* p, Lanes sum) {
  __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
  sum = fma(all(row[0]), from_upper_e4m3(_mm256_slli_epi16(pairs, 8)), sum);
  return fma(all(row[1]), from_upper_e4m3(pairs), sum);
}

static inline void store_shorts(int16_t* p, Lanes x) {
  __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

struct Shorts {
  __m256i a, b;
};
static inline Shorts shorts_of_bytes(const int8_t* p) {
  const __m128i* q = (const __m128i*)p;
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
struct TwoShorts {
  Shorts first, second;
};
static inline TwoShorts shorts_of_nibbles(const uint8_t* p) {
  const __m128i* q = (const __m128i*)p;
  const __m256i lower = _mm256_set1_epi16(15);
  __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128(q)), b = _mm256_cvtepu8_epi16(_mm_loadu_si128(q + 1));
  return {{_mm256_and_si256(a, lower), _mm256_and_si256(b, lower)}, {_mm256_srli_epi16(a, 4), _mm256_srli_epi16(b, 4)}};
}

static inline __m256i half_of_zeros(const uint8_t* p) {
  __m256i zeros = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_or_si256(zeros, _mm256_slli_epi32(zeros, 16 + 7));
}
static inline Shorts shorts_of_zeros(const uint8_t* p) { return {half_of_zeros(p), half_of_zeros(p + 8)}; }

static inline Lanes part(const float* p, int count, float rest) {
  float values[16];
  for (int i = 0; i < 16; i++) values[i] = i < count ? p[i] : rest;
  return load(values);
}
static inline bool ordered(Lanes x) {
  return !_mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)));
}
static inline unsigned at_least(Lanes x, float limit) {
  __m256 y = _mm256_set1_ps(limit);
  return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y, _CMP_GE_OQ)) |
         (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y, _CMP_GE_OQ)) << 8;
}

static inline __m256 half_exponent(__m256 x, __m256* m) {
  __m256i bits = _mm256_sub_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x3f3504f3));
  __m256i e = _mm256_srai_epi32(bits, 23);
  *m = _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(e, 23)));
  return _mm256_cvtepi32_ps(e);
}
static inline Lanes exponent(Lanes x, Lanes* m) { return {half_exponent(x.a, &m->a), half_exponent(x.b, &m->b)}; }

struct Words {
  __m256i a, b;
};

static inline Words words(uint32_t x) { return {_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)}; }
static inline Words load_words(const int* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
static inline Words dot_pairs(const int16_t* a, Shorts b, Words c) {
  int pair;
  __builtin_memcpy(&pair, a, 4);
  __m256i pairs = _mm256_set1_epi32(pair);
  return {_mm256_add_epi32(c.a, _mm256_madd_epi16(pairs, b.a)), _mm256_add_epi32(c.b, _mm256_madd_epi16(pairs, b.b))};
}
static inline Words exclusive(Words x, Words y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
static inline Words shift_right(Words x, int by) { return {_mm256_srli_epi32(x.a, by), _mm256_srli_epi32(x.b, by)}; }
static inline Lanes to_float(Words x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline __m256i half_multiply(__m256i x, __m256i factor, __m256i* high) {
  __m256i even = _mm256_mul_epu32(x, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
static inline Words multiply(Words x, uint32_t y, Words* high) {
  __m256i factor = _mm256_set1_epi32((int)y);
  return {half_multiply(x.a, factor, &high->a), half_multiply(x.b, factor, &high->b)};
}
static inline __m256i half_chosen(__m256i which, __m256i number, __m256i x, __m256i y) {
  return _mm256_blendv_epi8(y, x, _mm256_cmpeq_epi32(_mm256_and_si256(which, _mm256_set1_epi32(3)), number));
}
static inline Words chosen(Words which, int number, Words x, Words y) {
  __m256i n = _mm256_set1_epi32(number);
  return {half_chosen(which.a, n, x.a, y.a), half_chosen(which.b, n, x.b, y.b)};
}

#endif

// From here on this thread has zeros for subnormal numbers, of which each product would take a hundred cycles.
static inline void flush_subnormals() { _mm_setcsr(_mm_getcsr() | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }

// e^x for x <= 88 (of NaN: NaN), to 2 units in the last place or so: x / ln 2 is split into a whole power of two
// and a rest of half at most, for which six terms of 2^r = e^(r ln 2) do.
static inline Lanes exponential(Lanes x) {
  x = max(all(-87.0f), x);  // in this order NaN stays
  x = mul(x, all(1.44269504088896341f));
  Lanes power = nearest(x), r = sub(x, power);
  Lanes y = all(1.546144472480851e-4f);
  y = fma(y, r, all(1.340042817771194e-3f));
  y = fma(y, r, all(9.618056678432040e-3f));
  y = fma(y, r, all(5.550327226669895e-2f));
  y = fma(y, r, all(2.402265092228955e-1f));
  y = fma(y, r, all(6.931472067028329e-1f));
  y = fma(y, r, all(1.0f));
  return scaled(y, power);
}

// The natural logarithm of a normal x > 0: e ln 2 + log m, and log m = 2 artanh((m - 1) / (m + 1)).
static inline Lanes logarithm(Lanes x) {
  Lanes m;
  Lanes e = exponent(x, &m);
  Lanes t = div(sub(m, all(1)), add(m, all(1)));
  Lanes square = mul(t, t);
  Lanes y = all(2.0f / 9);
  y = fma(y, square, all(2.0f / 7));
  y = fma(y, square, all(2.0f / 5));
  y = fma(y, square, all(2.0f / 3));
  y = fma(y, square, all(2.0f));
  return fma(e, all(0.693147180559945f), mul(y, t));
}
