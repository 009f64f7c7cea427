/* Elements that differ between two memories of equal size, by their bits: found, written as records, applied.
 *
 * Memory is cut into pieces, a piece into blocks of 65536 elements. The record of a piece has the number of
 * changes of each block (32 bits each), then the places of all changes within their blocks (16 bits each,
 * ascending), then the new elements; each of the three starts at a multiple of 8 bytes, after zeros. All
 * numbers are little-endian. The format is that of holdfast/store/delta/records.py. */

#ifndef HOLDFAST_ELEMENT_DIFF_H
#define HOLDFAST_ELEMENT_DIFF_H

#include <Python.h>

PyObject *diff_pieces(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *patch_pieces(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
