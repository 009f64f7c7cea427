/* The `Words` type of Python: 8-byte words that other processes or threads change, with the memory order that
 * messages need.
 *
 * A read is an acquire: it happens after all earlier reads of this thread, and before all that follows. A
 * write is a release: it happens after all earlier reads and writes of this thread, and before all its later
 * writes. On x86 both are plain loads and stores. They leave one order open: a write followed by a read of
 * another word. */

#ifndef HOLDFAST_WORDS_H
#define HOLDFAST_WORDS_H

#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>

#include "arguments.h"

typedef struct {
    PyObject_HEAD Py_buffer memory;
    Py_ssize_t count;
} Words;

extern PyType_Spec words_spec;

#endif
