#ifndef ALLRED_INTERRUPT_H
#define ALLRED_INTERRUPT_H

#include "binding.h"

/* Call a function so that waits in it end on Ctrl-C, also in another thread than the main thread; see interrupt.c. */
PyObject *allred_call_interruptibly(PyObject *function, PyObject *arguments);

/* Called once, when the main thread imports the module. */
void allred_note_main_thread(void);

#endif
