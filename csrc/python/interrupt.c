/*
 * Ctrl-C in a thread of TensorFlow or JAX. Python runs its handler of SIGINT in the main thread, which may be blocked
 * inside of the framework. So while a function runs in another thread, the handler here also sets a flag, which
 * blocking collectives read.
 */
#include "interrupt.h"

#include <signal.h>

static volatile sig_atomic_t interrupted;
static struct sigaction previous;
static unsigned long main_thread;

static void on_interrupt(int number, siginfo_t *info, void *context) {
  interrupted = 1;
  if (previous.sa_flags & SA_SIGINFO)
    previous.sa_sigaction(number, info, context);
  else
    previous.sa_handler(number);
}

void allred_note_main_thread(void) { main_thread = PyThread_get_thread_ident(); }

/* Install the handler, and return 1: if Python handles the signal, this is not the main thread, and no other thread has
 * installed it. */
static int install_handler(void) {
  struct sigaction own = {.sa_sigaction = on_interrupt}, found;
  if (PyThread_get_thread_ident() == main_thread || sigaction(SIGINT, NULL, &found) < 0) return 0;
  if (found.sa_flags & SA_SIGINFO ? found.sa_sigaction == on_interrupt
                                  : found.sa_handler == SIG_DFL || found.sa_handler == SIG_IGN)
    return 0;
  interrupted = 0;
  previous = found;
  own.sa_flags = previous.sa_flags | SA_SIGINFO;
  own.sa_mask = previous.sa_mask;
  return sigaction(SIGINT, &own, NULL) == 0;
}

PyObject *allred_call_interruptibly(PyObject *function, PyObject *arguments) {
  const int installed = install_handler();
  PyObject *result = PyObject_CallObject(function, arguments);
  if (installed) {
    sigaction(SIGINT, &previous, NULL);
    interrupted = 0;
  }
  return result;
}

PyObject *allred_python_call_interruptibly(PyObject *module, PyObject *arguments) {
  PyObject *function = PyTuple_GetItem(arguments, 0), *others;
  if (!function || !(others = PyTuple_GetSlice(arguments, 1, PyTuple_Size(arguments)))) return NULL;
  PyObject *result = allred_call_interruptibly(function, others);
  Py_DECREF(others);
  return result;
}

PyObject *allred_python_interrupted(PyObject *module, PyObject *unused) { return PyBool_FromLong(interrupted); }
