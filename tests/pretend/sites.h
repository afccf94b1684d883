// Sites: where in a program something happened, as a name and the innermost lines of the project's Python that led there.
#pragma once

#include <Python.h>

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace order {

using Site = size_t; // an index into the sites that were seen
constexpr size_t FRAMES = 5;

using Frames = std::vector<std::pair<PyCodeObject*, int>>;

class Sites {
 public:
  // `name` and the innermost frames of the project now. takes_gil: so no lock may be held; else, where this thread has not the
  // GIL, the frames are those that it was last seen in: PyTorch frees memory without it. That may not wait for it: when
  // Python ends, it ends a thread that asks for the GIL, autograd's too, and to unwind a destructor is to terminate.
  Site here(std::string name, bool takes_gil = true) {
    thread_local Frames last;
    Frames frames;
    bool has_python = PyGILState_GetThisThreadState() && !Py_IsFinalizing(); // else a thread of PyTorch, which has none
    if (has_python && (takes_gil || PyGILState_Check())) {
      auto held = PyGILState_Ensure();
      last = frames = walk();
      PyGILState_Release(held);
    } else if (has_python) {
      frames = last;
      name += ", at some time after";
    }
    std::lock_guard<std::mutex> guard(lock);
    auto [found, is_new] = numbers.emplace(std::make_pair(name, frames), seen.size());
    if (is_new) seen.push_back(found->first);
    return found->second;
  }

  // needs the GIL
  std::string text(Site site) {
    std::lock_guard<std::mutex> guard(lock);
    auto& [name, frames] = seen.at(site);
    std::string told = name;
    for (auto [code, at] : frames) {
      told += "\n        " + std::string(PyUnicode_AsUTF8(code->co_filename)) + ":" +
          std::to_string(PyCode_Addr2Line(code, at)) + " " + PyUnicode_AsUTF8(code->co_name);
    }
    return frames.empty() ? told + "\n        no line of Python: perhaps a backward pass" : told;
  }

 private:
  std::mutex lock;
  std::map<std::pair<std::string, Frames>, Site> numbers;
  std::vector<std::pair<std::string, Frames>> seen;
  std::unordered_map<PyCodeObject*, bool> ours; // by code; the GIL guards it

  Frames walk() {
    Frames frames;
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame && frames.size() < FRAMES) {
      auto* code = PyFrame_GetCode(frame);
      if (is_ours(code)) frames.emplace_back(code, PyFrame_GetLasti(frame));
      Py_DECREF(code);
      auto* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    Py_XDECREF(frame);
    return frames;
  }

  bool is_ours(PyCodeObject* code) {
    auto [found, is_new] = ours.emplace(code, false);
    if (is_new) {
      Py_INCREF(code); // for ever: its address is a key
      std::string file = PyUnicode_AsUTF8(code->co_filename);
      auto has = [&](const char* part) { return file.find(part) != std::string::npos; };
      found->second = !has("site-packages") && !has("/tests/pretend/") && (has("/hpcllm/") || has("/tests/"));
    }
    return found->second;
  }
};

} // namespace order
