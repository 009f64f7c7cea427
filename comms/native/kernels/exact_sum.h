/* The correctly rounded sum of several blocks, elementwise, where one or two doubles hold the sum exactly:
 * the compiled part of holdfast/comms/exact/exact_sum.py. That holds for nearly all numbers; Python computes
 * the others.
 *
 * One double suffices for a chunk with numbers that span, from the last digit of the smallest to the first of
 * the largest, at most its 53 bits, including those for carries: floats of 24 bits that differ by a factor of
 * less than 2^27. These are simply added. Two doubles use D. Knuth's TwoSum, cascaded twice. A result that is
 * rounded again is first rounded to odd (S. Boldo, G. Melquiond, 2008). */

#ifndef HOLDFAST_EXACT_SUM_H
#define HOLDFAST_EXACT_SUM_H

#include <Python.h>

PyObject *sum_exactly(PyObject *module, PyObject *args);
PyObject *make_nans_alike(PyObject *module, PyObject *args);

#endif
