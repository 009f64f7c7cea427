/* Reductions of two blocks of numbers, element by element: out = a op b, for every dtype that CPUs reduce.
 *
 * `out` may be `a` or `b` itself, but must not overlap them otherwise. Minima and maxima keep NaNs; integers
 * wrap around; 16-bit floats are computed as 32-bit floats and rounded to nearest even, as in torch. */

#ifndef HOLDFAST_REDUCTIONS_H
#define HOLDFAST_REDUCTIONS_H

#include <stddef.h>

typedef void (*kernel)(void *out, const void *a, const void *b, size_t count);

/* A kind is a dtype and an op in one number: that of ("float32", "sum"); -1 if there is no such reduction. */
long kind_of(const char *dtype, const char *op);

/* NULL: there is no such reduction. */
kernel kernel_of(long kind);

size_t itemsize_of(long kind);

#endif
