/* Calls to make once the calls under way have ended: a close that a signal's handler asked for inside one of
 * them. */

#ifndef HOLDFAST_WHEN_LEFT_H
#define HOLDFAST_WHEN_LEFT_H

#include <Python.h>

/* Add a call to the list in `left`, which is made for the first one. True, or NULL with a Python error. */
PyObject *add_when_left(PyObject **left, PyObject *call);

/* Make the calls, and forget them. None, or NULL with the Python error of the last one that failed. An error
 * that is set when this begins stays set, unless one of the calls fails. */
PyObject *run_when_left(PyObject **left);

#endif
