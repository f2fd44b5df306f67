// Guards of the GIL for threads that may outlive the interpreter.
//
// A daemon thread that wants the GIL when the interpreter has ended waits until the process ends.
// CPython before 3.14 would call pthread_exit instead, which unwinds the thread's stack. Frames of
// this module must not be unwound so: destructors that are noexcept would abort, and the unwinder
// of wheels, which is linked statically, cannot read the state of the one that glibc loads.
#pragma once

#include <Python.h>

namespace persia::bindings {

// The GIL is free from here to the end of the block.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

// The GIL is held from here to the end of the block.
class GilAcquired {
 public:
  GilAcquired();
  ~GilAcquired() { PyGILState_Release(state_); }
  GilAcquired(const GilAcquired&) = delete;
  GilAcquired& operator=(const GilAcquired&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace persia::bindings
