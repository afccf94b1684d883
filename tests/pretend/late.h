// What operations have written, kept aside until somebody has waited for it; meanwhile there is poison in its place.
//
//     an operation begins     of what is aside its stream's clock knows some: that is shown to it; the rest stays poison
//     it ends                 what it has written is put aside, what it was shown is hidden again
//     the host learns         what its clock knows lies in memory for good: host and MPI may read it
//
// So each operation takes effect as late as the program allows, which of all orders is the worst for who has forgotten a
// wait. Their reads are as late. Who writes, receives or frees what an operation reads, without order, has poisoned what
// that will write, and what was computed of it (damage). Two writes without order leave poison; memory that is freed while
// a write to it may yet come gives that write to whoever takes it next.
#pragma once

#include <algorithm>
#include <cstring>
#include <list>

#include "order.h"

namespace order {

constexpr int POISON = 0xFF; // NaN in every type of floats

struct Reach { // of an operation
  Span span;
  Access access;
};

class Late { // everything under the lock of Order
 public:
  explicit Late(void* (*behind)(const void*)) : behind(behind) {}

  // An operation that reaches this memory; its stream's clock is given.
  void begin(Epoch epoch, const std::vector<Reach>& reaches, const Clock& clock) {
    Operation operation{epoch, {}, {}, false};
    for (auto& [span, access] : reaches) {
      if (access == WRITE) split(span);
      if (access == READ) operation.reads.push_back(span);
      for_each(span, [&](auto piece) {
        if (!knows(clock, piece->second.epoch)) return std::next(piece);
        show(piece);
        operation.from.push_back(piece->second.epoch);
        return access == WRITE ? pieces.erase(piece) : std::next(piece); // what is left of it, it puts aside itself
      });
      running.push_back({epoch, span});
    }
    told[epoch.actor].push_back(std::move(operation));
  }

  // It has been computed; `reaches` with what it has made anew.
  void end(Epoch epoch, const std::vector<Reach>& reaches) {
    running.remove_if([&](auto& one) { return one.first == epoch; });
    auto* operation = find(epoch); // none: a host thread has waited for it
    for (auto& [span, access] : reaches) {
      if (access == WRITE && operation) put_aside(span, *operation);
    }
    for (auto& reach : reaches) hide(reach.span);
  }

  // A host thread with this clock may now read what it knows.
  void publish(const Clock& clock) {
    bool is_news = false;
    for (auto& [actor, operations] : told) {
      while (!operations.empty() && operations.front().epoch.time <= clock.at(actor)) {
        operations.pop_front();
        is_news = true;
      }
    }
    for (auto piece = pieces.begin(); is_news && piece != pieces.end();) {
      bool is_known = knows(clock, piece->second.epoch);
      if (is_known) show(piece);
      piece = is_known ? pieces.erase(piece) : std::next(piece);
    }
  }

  // `look` finds in this memory all that was written, whoever knows it.
  template <typename Look>
  void reveal(Span span, Look look) {
    for_each(span, [&](auto piece) { return show(piece), std::next(piece); });
    look();
    hide(span);
  }

  // Memory is freed: nothing comes any more.
  void forget(Span span) {
    split(span);
    for_each(span, [&](auto piece) { return pieces.erase(piece); });
  }

  // Memory is freed: what `clock` does not know may still come.
  void forget(Span span, const Clock& clock) {
    split(span);
    for_each(span, [&](auto piece) { return knows(clock, piece->second.epoch) ? pieces.erase(piece) : std::next(piece); });
  }

  // What these operations read has changed under their hands, or may have.
  void damage(std::vector<Disturbed>& disturbed) {
    for (auto& [span, actor, since] : disturbed) {
      for (auto& operation : told[actor]) {
        auto overlaps = [&](Span read) { return are_one(read, span); };
        if (operation.epoch.time > since && std::ranges::any_of(operation.reads, overlaps)) operation.is_damaged = true;
      }
    }
    if (!disturbed.empty()) spread();
    disturbed.clear();
  }

  void damage(Epoch epoch) {
    if (auto* operation = find(epoch)) operation->is_damaged = true;
    spread();
  }

 private:
  struct Operation { // that no host thread knows to be over
    Epoch epoch;
    std::vector<Span> reads;
    std::vector<Epoch> from; // of whose results it was computed
    bool is_damaged;
  };
  struct Piece { // under its first address
    size_t end;
    std::vector<char> bytes;
    Epoch epoch;
    bool is_shown;
  };
  using Pieces = std::map<size_t, Piece>;

  void* (*behind)(const void*); // where the bytes of an address are
  Pieces pieces;
  std::map<Actor, std::deque<Operation>> told; // the oldest first
  std::list<std::pair<Epoch, Span>> running;

  static bool are_one(Span a, Span b) { return a.first < b.second && b.first < a.second; }
  void* place(size_t address) const { return behind(reinterpret_cast<void*>(address)); }

  Operation* find(Epoch epoch) {
    auto& operations = told[epoch.actor];
    auto found = std::ranges::lower_bound(operations, epoch.time, {}, [](auto& one) { return one.epoch.time; });
    return found != operations.end() && found->epoch == epoch ? &*found : nullptr;
  }

  template <typename Visit>
  void for_each(Span span, Visit visit) {
    auto piece = pieces.lower_bound(span.first);
    if (piece != pieces.begin() && std::prev(piece)->second.end > span.first) --piece;
    while (piece != pieces.end() && piece->first < span.second) piece = visit(piece);
  }

  // no piece lies across the ends of the span
  void split(Span span) {
    for (auto at : {span.first, span.second}) {
      auto next = pieces.lower_bound(at);
      if (next == pieces.begin()) continue;
      auto& [start, piece] = *std::prev(next);
      if (piece.end <= at) continue;
      auto cut = piece.bytes.begin() + (at - start);
      pieces.emplace_hint(next, at, Piece{piece.end, {cut, piece.bytes.end()}, piece.epoch, piece.is_shown});
      piece.bytes.erase(cut, piece.bytes.end());
      piece.end = at;
    }
  }

  void show(Pieces::iterator piece) {
    if (!piece->second.is_shown) memcpy(place(piece->first), piece->second.bytes.data(), piece->second.bytes.size());
    piece->second.is_shown = true;
  }

  void hide(Span span) {
    for_each(span, [&](auto piece) {
      Span all{piece->first, piece->second.end};
      bool is_read = std::ranges::any_of(running, [&](auto& one) { return are_one(one.second, all); });
      if (piece->second.is_shown && !is_read) {
        memset(place(piece->first), POISON, piece->second.bytes.size());
        piece->second.is_shown = false;
      }
      return std::next(piece);
    });
  }

  void put_aside(Span span, const Operation& operation) {
    auto* from = static_cast<const char*>(place(span.first));
    Piece made{span.second, {from, from + (span.second - span.first)}, operation.epoch, true};
    split(span);
    for_each(span, [&](auto other) {
      bool is_ours = other->second.epoch == operation.epoch; // of results that overlap; else of who had no order with it
      if (!is_ours) memset(made.bytes.data() + (other->first - span.first), POISON, other->second.bytes.size());
      return pieces.erase(other);
    });
    if (operation.is_damaged) std::ranges::fill(made.bytes, static_cast<char>(POISON));
    pieces.emplace(span.first, std::move(made));
  }

  // what was computed of what is damaged is damaged
  void spread() {
    auto is_damaged = [&](Epoch epoch) {
      auto* operation = find(epoch);
      return operation && operation->is_damaged;
    };
    for (bool is_more = true; is_more;) {
      is_more = false;
      for (auto& [actor, operations] : told) {
        for (auto& operation : operations) {
          if (operation.is_damaged || std::ranges::none_of(operation.from, is_damaged)) continue;
          operation.is_damaged = is_more = true;
        }
      }
    }
    for (auto& [start, piece] : pieces) {
      if (!is_damaged(piece.epoch)) continue;
      std::ranges::fill(piece.bytes, static_cast<char>(POISON));
      if (piece.is_shown) memset(place(start), POISON, piece.bytes.size());
    }
  }
};

} // namespace order
