#include "bindings/gil.h"

#include <pthread.h>
#include <unistd.h>

// glibc calls what pthread_cleanup_push registers before it unwinds the frame. With exceptions, the
// macro makes a destructor instead, which the unwinder would have to find.
#ifdef __EXCEPTIONS
#error "compile this file with -fno-exceptions"
#endif

namespace persia::bindings {
namespace {

void WaitForExit(void*) {
  while (true) pause();
}

}  // namespace

GilReleased::~GilReleased() {
  pthread_cleanup_push(WaitForExit, nullptr);
  PyEval_RestoreThread(state_);
  pthread_cleanup_pop(0);
}

GilAcquired::GilAcquired() {
  pthread_cleanup_push(WaitForExit, nullptr);
  state_ = PyGILState_Ensure();
  pthread_cleanup_pop(0);
}

}  // namespace persia::bindings
