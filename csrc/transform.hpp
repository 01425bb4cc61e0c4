// Plans with a transform before them: tiles of whole blocks are transformed in the cache, and what the transform gives
// goes through the same encode and decode as everything else.
//
// A transform is a class with size (values in a block), count and side_bytes (of m values of a block), forward and
// inverse (of one block); x and out have room up to a multiple of GROUP, and x has zeros there. IN_PLACE: as many values
// come out as went in, and inverse finds them in out.
#pragma once

#include <memory>

#include "cast.hpp"
#include "plans.hpp"
#include "spike.hpp"

namespace nc::NC_ISA {

// Where a tile's values, the inner values and the side plane begin, and how many of each there are.
struct Span {
  int64_t begin, end, inner_begin, side_begin;
  int inner_count;
};

// Half a megabyte: on the heap, since threads may have a stack of less.
template <class Transform>
struct TransformBuffers {
  alignas(64) float out[MAX_TILE + GROUP];  // first: see Placed
  alignas(64) float wanted[MAX_TILE + GROUP];
  alignas(64) float kept[MAX_TILE + GROUP];
  alignas(64) uint8_t cast[4 * MAX_TILE];
  alignas(64) float scratch[CHUNK];
  typename Transform::Buffers own;
};

template <class Transform>
class Tiles {
  const Transform transform;
  const nc_transform& how;
  const int64_t inner_n;
  TransformBuffers<Transform>& buffers;

 public:
  Tiles(const nc_transform& how, int64_t n, TransformBuffers<Transform>& buffers)
      : transform(how), how(how), inner_n(inner_count(n)), buffers(buffers) {}

  // With as many inner values as values, what the first-level cache holds.
  int64_t step() const {
    constexpr int64_t tile = Transform::IN_PLACE ? CHUNK : TILE;
    return transform.size >= tile ? transform.size : tile / transform.size * transform.size;
  }

  Span span(int64_t begin, int64_t end) const {
    const int64_t blocks = begin / transform.size;
    return {begin, end, blocks * transform.count(int(transform.size)),
            blocks * transform.side_bytes(int(transform.size)), int(inner_count(end - begin))};
  }

  void encode(const TransformWire& wire, const Philox& noise, uint64_t offset, const float* x, const Span& span) const {
    float* kept = buffers.kept;
    uint8_t* side = wire.side + span.side_begin;
    each_block(span, [&](int64_t at, int m) {
      // of the next tile: the encoding of this one leaves memory nothing to do
      fetch(x + step() + at, m);
      transform.forward(x + at, m, kept, side, buffers.own);
      kept += transform.count(m);
      side += transform.side_bytes(m);
    });
    const int64_t first = span.inner_begin, last = first + span.inner_count;
    if (how.inner) {
      for (int i = span.inner_count; i < round_up(span.inner_count); i++) buffers.kept[i] = 0;
      const EncodeJob job = {how.inner, buffers.kept - first, NC_FLOAT32, inner_n, wire.codes, wire.scales,
                             noise.seed, noise.stream, offset, {}};
      encode_part(job, first, last);
      return;
    }
    const CastJob job = {buffers.kept, NC_FLOAT32, inner_n, buffers.cast, how.stored, false, false};
    cast_range(job, 0, span.inner_count);
    __builtin_memcpy(wire.codes + first * stored_bytes(), buffers.cast, stored_bytes() * span.inner_count);
  }

  void decode(const TransformWire& wire, const Span& span, float* out) const {
    const int64_t first = span.inner_begin, last = first + span.inner_count;
    float* const inner = Transform::IN_PLACE ? out : buffers.kept;
    if (how.inner) {
      const DecodeJob job = {how.inner, wire.codes, wire.scales, 0, inner_n, inner - first, NC_FLOAT32, false, false};
      decode_range(job, first, last);
    } else {
      __builtin_memcpy(buffers.cast, wire.codes + first * stored_bytes(), stored_bytes() * span.inner_count);
      const CastJob job = {buffers.cast, how.stored, inner_n, inner, NC_FLOAT32, false, false};
      cast_range(job, 0, span.inner_count);
    }
    const float* kept = inner;
    const uint8_t* side = wire.side + span.side_begin;
    each_block(span, [&](int64_t at, int m) {
      transform.inverse(kept, side, m, out + at, buffers.own);
      kept += transform.count(m);
      side += transform.side_bytes(m);
    });
  }

  void write(const Sink& sink, const Span& span, const float* values) const {
    for (int64_t at = span.begin; at < span.end; at += CHUNK) {
      sink.write(values + (at - span.begin), at, int(smaller(CHUNK, span.end - at)), buffers.scratch);
    }
  }

 private:
  int64_t stored_bytes() const { return how.stored == NC_FLOAT32 ? 4 : 2; }

  int64_t inner_count(int64_t n) const {
    const int rest = int(n % transform.size);
    return n / transform.size * transform.count(int(transform.size)) + (rest ? transform.count(rest) : 0);
  }

  template <class Body>
  void each_block(const Span& span, const Body& body) const {
    const int64_t count = span.end - span.begin;
    for (int64_t at = 0; at < count; at += transform.size) body(at, int(smaller(transform.size, count - at)));
  }
};

template <class Transform>
static void encode_tiles(const TransformJob& job, const Owed& owed, int64_t begin, int64_t end) {
  const std::unique_ptr<TransformBuffers<Transform>> room(new TransformBuffers<Transform>);
  TransformBuffers<Transform>& buffers = *room;
  const Tiles<Transform> tiles(*job.transform, job.n, buffers);
  const Source source = {job.x, job.dtype};
  for (int64_t at = begin; at < end; at += tiles.step()) {
    const Span span = tiles.span(at, smaller(at + tiles.step(), end));
    const int count = int(span.end - at);
    const Philox noise = {job.seed, job.stream};
    if (!owed.residual) {
      tiles.encode(job.wire, noise, job.offset, source.read(at, count, buffers.wanted), span);
      continue;
    }
    source.copy(at, count, buffers.wanted);
    add_owed(owed, at, count, buffers.wanted);
    tiles.encode(job.wire, noise, job.offset, buffers.wanted, span);
    tiles.decode(job.wire, span, buffers.out);
    owe(owed, at, count, buffers.wanted, buffers.out);
  }
}

template <class Transform>
static void decode_tiles(const TransformJob& job, const Sink& sink, int64_t begin, int64_t end) {
  using Place = Placed<TransformBuffers<Transform>>;
  const std::unique_ptr<Place> place(new Place(uintptr_t(sink.out) + sizeof(float) * begin));
  TransformBuffers<Transform>& buffers = place->buffers();
  const Tiles<Transform> tiles(*job.transform, job.n, buffers);
  for (int64_t at = begin; at < end; at += tiles.step()) {
    const Span span = tiles.span(at, smaller(at + tiles.step(), end));
    tiles.decode(job.wire, span, buffers.out);
    tiles.write(sink, span, buffers.out);
  }
  if (sink.streaming) end_streaming();
}

template <class Transform>
static void reduce_tiles(const TransformJob& job, const TransformSum& sum, int64_t begin, int64_t end) {
  const std::unique_ptr<TransformBuffers<Transform>> room(new TransformBuffers<Transform>);
  TransformBuffers<Transform>& buffers = *room;
  const Tiles<Transform> tiles(*job.transform, job.n, buffers);
  const Sink sink = {sum.out, sum.out_dtype, false, false, true};
  for (int64_t at = begin; at < end; at += tiles.step()) {
    const Span span = tiles.span(at, smaller(at + tiles.step(), end));
    const int count = int(span.end - at);
    for (int32_t rank = 0; rank < sum.world; rank++) {
      uint8_t* const wire = const_cast<uint8_t*>(sum.wires[rank]);
      tiles.decode({wire, wire + sum.scales_at, wire + sum.side_at}, span, rank ? buffers.out : buffers.wanted);
      if (rank) add_to(buffers.wanted, buffers.out, count);
    }
    for (int i = count; i < round_up(count); i++) buffers.wanted[i] = 0;
    finish_sum(sum.divide, sum.multiply, buffers.wanted, count);
    if (sum.owed.residual) add_owed(sum.owed, at, count, buffers.wanted);
    tiles.encode(job.wire, {job.seed, job.stream}, job.offset, buffers.wanted, span);
    if (!sum.owed.residual && !sum.out) continue;
    tiles.decode(job.wire, span, buffers.out);
    if (sum.owed.residual) owe(sum.owed, at, count, buffers.wanted, buffers.out);
    if (sum.out) tiles.write(sink, span, buffers.out);
  }
}

static bool can_transform(const nc_transform& transform) {
  if (transform.size < GROUP || transform.size % GROUP != 0 || transform.size > MAX_TILE) return false;
  if (transform.number < 1 || transform.number > transform.size) return false;
  if (transform.kind != NC_TOP && (transform.kind != NC_SPIKE || transform.number > MAX_SPIKES)) return false;
  if (!transform.inner) return true;
  const nc_plan& inner = *transform.inner;
  return inner.block > 0 && inner.store != NC_STORE_NONE && can_fuse(inner);
}

static void encode_transform(const TransformJob& job, const Owed& owed, int64_t begin, int64_t end) {
  (job.transform->kind == NC_TOP ? encode_tiles<Top> : encode_tiles<Spike>)(job, owed, begin, end);
}

static void decode_transform(const TransformJob& job, void* out, int32_t dtype, bool accumulate, bool streaming,
                             int64_t begin, int64_t end) {
  const Sink sink = {out, dtype, accumulate, streaming, true};
  (job.transform->kind == NC_TOP ? decode_tiles<Top> : decode_tiles<Spike>)(job, sink, begin, end);
}

static void reduce_transform(const TransformJob& job, const TransformSum& sum, int64_t begin, int64_t end) {
  (job.transform->kind == NC_TOP ? reduce_tiles<Top> : reduce_tiles<Spike>)(job, sum, begin, end);
}

}  // namespace nc::NC_ISA
