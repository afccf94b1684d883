// Order of accesses to memory: vector clocks of streams, host threads and messages. A race is two accesses without order.
//
//     actor      its clock grows by              and takes in the clock of
//     stream     each operation (launch)         the launching thread; an event that it waits for (Event)
//     thread     each launch, record, release    an event or stream that it synchronises; a thread it waits for; a message
//     message    its completion                  the thread that started it
//
//     clock[a][b] = t    all that b did up to its time t happened before what a does next
//     access (b, t) happened before what a does now  <=>  clock[a][b] >= t
//
// Memory is remembered by ranges: the last write of each, and the reads since (Flanagan, Freund: FastTrack, PLDI 2009, there
// for threads). Each access keeps the Python lines that made it, so that a race names both of its sides.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sites.h"

namespace order {

using Time = uint64_t;
using Actor = size_t;
using Span = std::pair<size_t, size_t>; // first address and the one behind
enum Access { READ, WRITE };
constexpr size_t MOST_FAULTS = 20;
constexpr Time ALWAYS = ~Time{0}; // later than all that happens
constexpr Actor MAIN = 0; // the thread of the program, and those of PyTorch that work while it waits

struct Clock {
  std::vector<Time> times;
  Time at(Actor actor) const { return actor < times.size() ? times[actor] : 0; }
  Time& of(Actor actor) {
    if (actor >= times.size()) times.resize(actor + 1);
    return times[actor];
  }
  void join(const Clock& other) {
    for (Actor actor = 0; actor < other.times.size(); ++actor) of(actor) = std::max(at(actor), other.times[actor]);
  }
};

// ---- memory

struct Epoch {
  Actor actor;
  Time time;
  Site site;
  bool operator==(const Epoch& other) const { return actor == other.actor && time == other.time; }
};
inline bool knows(const Clock& clock, const Epoch& epoch) { return clock.at(epoch.actor) >= epoch.time; }

struct Cell { // of a range of addresses, under its start
  size_t end;
  std::vector<Epoch> writes; // one or none
  std::vector<Epoch> reads; // since then, one an actor
};

struct Disturbed { // reads of an actor since a time, of memory that is no longer theirs
  Span span;
  Actor actor;
  Time since;
};

struct Fault {
  std::string what;
  Site now, before;
  bool operator<(const Fault& other) const {
    return std::tie(what, now, before) < std::tie(other.what, other.now, other.before);
  }
};

class Memory {
 public:
  std::set<Fault> faults;
  std::vector<Disturbed> disturbed; // for late.h

  // an access of actor, whose clock is given, at its time `time`
  void touch(Span span, Access access, const Clock& clock, Epoch epoch, const char* what = "race") {
    if (span.first >= span.second) return;
    for (auto cell = first_of(span); cell != cells.end() && cell->first < span.second; ++cell) {
      check(cell->second.writes, clock, epoch, what);
      if (access == WRITE) check_reads(cell->second.reads, span, clock, epoch, what);
    }
    if (access == WRITE) {
      forget(span);
      cells[span.first] = {span.second, {epoch}, {}};
    } else {
      read(span, epoch);
    }
  }

  // memory is freed: `clock` knows what whoever takes it next comes after
  void check_freed(Span span, const Clock& clock, Site site) {
    for_each(span, [&](const Epoch& before) { check_reads({before}, span, clock, {0, 0, site}, FREED); });
  }

  // pinned memory is freed: streams are waited for by the allocator, messages are not
  void check_messages(Span span, const Clock& clock, Site site) {
    for_each(span, [&](const Epoch& before) {
      if (messages.count(before.actor)) check({before}, clock, {0, 0, site}, FREED);
    });
  }

  std::set<Actor> messages; // actors that are messages

  void forget(Span span) { cells.erase(first_of(span), split(span.second)); }

  void note(Fault fault) {
    if (faults.size() < MOST_FAULTS) faults.insert(std::move(fault));
  }

 private:
  static constexpr const char* FREED = "memory is freed while it is used";
  std::map<size_t, Cell> cells;

  template <typename Visit>
  void for_each(Span span, Visit visit) {
    for (auto cell = first_of(span); cell != cells.end() && cell->first < span.second; ++cell) {
      for (auto& epoch : cell->second.writes) visit(epoch);
      for (auto& epoch : cell->second.reads) visit(epoch);
    }
  }

  // the cell that begins at `place`, or the first one behind; one across it is cut in two
  std::map<size_t, Cell>::iterator split(size_t place) {
    auto next = cells.lower_bound(place);
    if (next == cells.begin() || (next != cells.end() && next->first == place)) return next;
    auto before = std::prev(next);
    if (before->second.end <= place) return next;
    auto rest = before->second;
    before->second.end = place;
    return cells.emplace_hint(next, place, std::move(rest));
  }

  std::map<size_t, Cell>::iterator first_of(Span span) {
    split(span.second);
    return split(span.first);
  }

  void read(Span span, Epoch epoch) {
    size_t place = span.first;
    for (auto cell = first_of(span); place < span.second; ++cell) {
      size_t start = cell == cells.end() ? span.second : std::min(cell->first, span.second);
      if (place < start) cell = cells.emplace_hint(cell, place, Cell{start, {}, {}}); // never used before
      auto& reads = cell->second.reads;
      std::erase_if(reads, [&](auto& one) { return one.actor == epoch.actor; });
      reads.push_back(epoch);
      place = cell->second.end;
    }
  }

  void check(const std::vector<Epoch>& epochs, const Clock& clock, Epoch now, const char* what) {
    for (auto& before : epochs) {
      if (!knows(clock, before)) note({what, now.site, before.site});
    }
  }

  void check_reads(const std::vector<Epoch>& epochs, Span span, const Clock& clock, Epoch now, const char* what) {
    check(epochs, clock, now, what);
    for (auto& before : epochs) {
      if (!knows(clock, before)) disturbed.push_back({span, before.actor, clock.at(before.actor)});
    }
  }
};

// ---- actors

struct Event { // what a stream, and the thread that told it so, had done
  Clock clock;
  Actor thread;
  Time time;
  Site site;
};

inline thread_local Actor this_thread = MAIN;

class Order { // everything under its lock
 public:
  std::mutex lock;
  Sites sites;
  Memory memory;

  Order() { actor(); } // MAIN

  Actor actor() {
    clocks.emplace_back().of(clocks.size() - 1) = 1;
    return clocks.size() - 1;
  }
  const Clock& clock(Actor actor) const { return clocks.at(actor); }
  const Clock& host() const { return clocks.at(this_thread); }

  // the stream is told something: that comes after all that this thread knows
  const Clock& tell(Actor stream) {
    clocks[stream].join(host());
    tick(this_thread);
    return clocks[stream];
  }
  Epoch launch(Actor stream, Site site) {
    tell(stream);
    return {stream, tick(stream), site};
  }
  Time tick(Actor actor) { return ++clocks[actor].of(actor); }

  Event record(Actor stream, Site site) {
    auto time = host().at(this_thread);
    return {tell(stream), this_thread, time, site};
  }
  // this thread uses an event: it has to know that it was recorded
  void use(const Event& event, Site site) {
    if (host().at(event.thread) < event.time) {
      memory.note({"an event of another thread, which was not waited for", site, event.site});
    }
  }
  void wait(Actor stream, const Event& event) {
    tell(stream);
    clocks[stream].join(event.clock);
  }
  void learn(const Clock& other) { clocks[this_thread].join(other); }

  // what this thread has done so far, for another one that waits for it
  Clock release() {
    Clock now = host();
    tick(this_thread);
    return now;
  }

  struct Message {
    Actor actor;
    Time time;
  };
  Message begin(Span span, Access access, Site site) {
    Message message{spare.empty() ? actor() : spare.back(), 0};
    if (!spare.empty()) spare.pop_back();
    memory.messages.insert(message.actor);
    message.time = tick(message.actor);
    memory.touch(span, access, host(), {message.actor, message.time, site}, "a message meets memory in use");
    tick(this_thread);
    return message;
  }
  void end(Message message) {
    auto& known = clocks[this_thread].of(message.actor);
    known = std::max(known, message.time);
    spare.push_back(message.actor);
  }

 private:
  std::deque<Clock> clocks;
  std::vector<Actor> spare; // actors of messages that are over
};

} // namespace order
