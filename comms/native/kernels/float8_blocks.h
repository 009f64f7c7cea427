/* Rows of float32 as float8 (e4m3, finite and NaN) with a power of two as the scale of each block of a row.
 *
 * The format, and its bound, are those of holdfast/comms/codecs/float8_blocks.py. Blocks begin at the first
 * element of a row. */

#ifndef HOLDFAST_FLOAT8_BLOCKS_H
#define HOLDFAST_FLOAT8_BLOCKS_H

#include <Python.h>

PyObject *float8_encode(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *float8_decode(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
