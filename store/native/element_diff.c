/* Elements that differ between two memories of equal size, by their bits: found, written as records, applied.
 *
 * Memory is cut into pieces, a piece into blocks of 65536 elements. The record of a piece has the number of
 * changes of each block (32 bits each), then the places of all changes within their blocks (16 bits each,
 * ascending), then the new elements; each of the three starts at a multiple of 8 bytes, after zeros. All
 * numbers are little-endian. The format is that of holdfast/store/delta/records.py. */

#define PY_SSIZE_T_CLEAN
#include "digest_copy.h"
#include "module.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define DIFF_BLOCK 65536
#define DIFF_GROUP 64 /* elements that are compared at once */
#define LAST_BIT ((uint64_t)1 << 63)
#define DIFF_SLACK                                                                                           \
    (2 * DIFF_BLOCK + 64) /* bytes that a record may overrun its limit by, before it is given up */
#define TOO_MANY_CHANGES 0xffffffffu

/* A piece of the two memories: addresses, and `itemsize` bytes of an element: 1, 2, 4 or 8. */
typedef struct {
    uint64_t base, changed, nbytes, itemsize;
} diff_piece;

/* A piece to make from `base` at `into` (which may be `base`) with a record of `size` bytes: none, if that is
 * 0. */
typedef struct {
    uint64_t base, into, nbytes, itemsize, record, size;
} patch_piece;

static inline uint64_t to_eight(uint64_t nbytes) { return (nbytes + 7) & ~(uint64_t)7; }

static inline uint64_t blocks_of(uint64_t elements) { return (elements + DIFF_BLOCK - 1) / DIFF_BLOCK; }

static inline uint64_t record_bytes(uint64_t blocks, uint64_t changes, uint64_t itemsize) {
    return to_eight(4 * blocks) + to_eight(2 * changes) + to_eight(itemsize * changes);
}

/* -- which of 64 elements differ, as a mask */

#define INLINED static inline __attribute__((always_inline))

typedef uint64_t (*group_diff)(const uint8_t *a, const uint8_t *b, size_t itemsize);

INLINED uint64_t differ(const uint8_t *a, const uint8_t *b, size_t itemsize) {
    uint64_t mask = 0;
    if (memcmp(a, b, DIFF_GROUP * itemsize))
        for (int i = 0; i < DIFF_GROUP; i++, a += itemsize, b += itemsize)
            mask |= (uint64_t)(memcmp(a, b, itemsize) != 0) << i;
    return mask;
}

#if defined(__x86_64__)
#define WITH_AVX2 __attribute__((target("avx2,bmi,popcnt")))
#define EQUAL(BITS, number)                                                                                  \
    _mm256_cmpeq_epi##BITS(_mm256_loadu_si256((const __m256i *)a + number),                                  \
                           _mm256_loadu_si256((const __m256i *)b + number))

/* A bit for each element of 64 bytes, set if they are equal. */
WITH_AVX2 INLINED uint64_t equal_elements(const uint8_t *a, const uint8_t *b, size_t itemsize) {
#define BITS_OF(MASK, BITS, count) (uint32_t)MASK(0, BITS) | (uint64_t)(uint32_t)MASK(1, BITS) << count
#define BYTES(number, BITS) _mm256_movemask_epi8(EQUAL(BITS, number))
#define FLOATS(number, BITS) _mm256_movemask_ps(_mm256_castsi256_ps(EQUAL(BITS, number)))
#define DOUBLES(number, BITS) _mm256_movemask_pd(_mm256_castsi256_pd(EQUAL(BITS, number)))
    switch (itemsize) {
    case 1:
        return BITS_OF(BYTES, 8, 32);
    case 2: /* packed by lanes */
        return (uint32_t)_mm256_movemask_epi8(
            _mm256_permute4x64_epi64(_mm256_packs_epi16(EQUAL(16, 0), EQUAL(16, 1)), 0xd8));
    case 4:
        return BITS_OF(FLOATS, 32, 8);
    default:
        return BITS_OF(DOUBLES, 64, 4);
    }
}

WITH_AVX2 INLINED uint64_t differ_avx2(const uint8_t *a, const uint8_t *b, size_t itemsize) {
    uint64_t equal = 0;
#pragma GCC unroll 8
    for (size_t i = 0; i < itemsize; i++)
        equal |= equal_elements(a + 64 * i, b + 64 * i, itemsize) << 64 / itemsize * i;
    return ~equal;
}
#endif

INLINED uint8_t *put_place(uint8_t *places, size_t place) {
    uint16_t bits = (uint16_t)place;
    memcpy(places, &bits, 2);
    return places + 2;
}

INLINED size_t diff_block_with(group_diff differ, size_t itemsize, const uint8_t *a, const uint8_t *b,
                               size_t elements, uint8_t *places) {
    uint8_t *end = places;
    size_t done = 0;
    for (; done + DIFF_GROUP <= elements;
         done += DIFF_GROUP, a += DIFF_GROUP * itemsize, b += DIFF_GROUP * itemsize) {
        uint64_t mask = differ(a, b, itemsize);
        uint8_t *next = end + 2 * __builtin_popcountll(mask);
        do { /* four at a time, wanted or not: a branch for each would often be mispredicted */
            for (int i = 0; i < 4; i++, mask &= mask - 1)
                end = put_place(end, done + (size_t)__builtin_ctzll(mask | LAST_BIT));
        } while (mask);
        end = next;
    }
    for (; done < elements; done++, a += itemsize, b += itemsize)
        if (memcmp(a, b, itemsize))
            end = put_place(end, done);
    return (size_t)(end - places) / 2;
}

/* CALL with the itemsize as a constant. */
#define BY_ITEMSIZE(CALL)                                                                                    \
    (itemsize == 1 ? CALL(1) : itemsize == 2 ? CALL(2) : itemsize == 4 ? CALL(4) : CALL(8))

/* Writes the places of all differing elements of a block to `places`; returns how many there are. */
typedef size_t (*block_diff)(uint64_t itemsize, const uint8_t *a, const uint8_t *b, size_t elements,
                             uint8_t *places);

static size_t diff_block(uint64_t itemsize, const uint8_t *a, const uint8_t *b, size_t elements,
                         uint8_t *places) {
#define PORTABLE(ITEMSIZE) diff_block_with(differ, ITEMSIZE, a, b, elements, places)
    return BY_ITEMSIZE(PORTABLE);
}

#if defined(__x86_64__)
WITH_AVX2 static size_t diff_block_avx2(uint64_t itemsize, const uint8_t *a, const uint8_t *b,
                                        size_t elements, uint8_t *places) {
#define VECTORIZED(ITEMSIZE) diff_block_with(differ_avx2, ITEMSIZE, a, b, elements, places)
    return BY_ITEMSIZE(VECTORIZED);
}
#endif

static block_diff block_diff_of(int portable) {
#if defined(__x86_64__)
    if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi"))
        return diff_block_avx2;
#else
    (void)portable;
#endif
    return diff_block;
}

/* -- records */

INLINED int move_elements(size_t itemsize, int gathers, uint8_t *into, const uint8_t *from,
                          const uint8_t *places, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint16_t place;
        memcpy(&place, places + 2 * i, 2);
        memcpy(into + itemsize * (gathers ? i : place), from + itemsize * (gathers ? place : i), itemsize);
    }
    return 0;
}

/* Copy the elements of `from` at `places` to adjacent ones. */
static void gather(uint64_t itemsize, uint8_t *into, const uint8_t *from, const uint8_t *places,
                   size_t count) {
#define GATHER(ITEMSIZE) move_elements(ITEMSIZE, 1, into, from, places, count)
    (void)BY_ITEMSIZE(GATHER);
}

/* Copy adjacent elements to `places` of `into`. */
static void scatter(uint64_t itemsize, uint8_t *into, const uint8_t *from, const uint8_t *places,
                    size_t count) {
#define SCATTER(ITEMSIZE) move_elements(ITEMSIZE, 0, into, from, places, count)
    (void)BY_ITEMSIZE(SCATTER);
}

static inline size_t elements_of_block(uint64_t elements, uint64_t block) {
    uint64_t left = elements - block * DIFF_BLOCK;
    return left < DIFF_BLOCK ? (size_t)left : DIFF_BLOCK;
}

/* Write the record of a piece to `record`, of which `most + DIFF_SLACK` bytes may be written to. Returns its
 * size; 0 if nothing differs, TOO_MANY_CHANGES if it would take more than `most` bytes. */
static uint32_t diff_piece_into(const diff_piece *piece, uint64_t most, uint8_t *record, int portable) {
    const uint8_t *base = (const uint8_t *)(uintptr_t)piece->base,
                  *changed = (const uint8_t *)(uintptr_t)piece->changed;
    uint64_t itemsize = piece->itemsize, elements = piece->nbytes / itemsize, blocks = blocks_of(elements),
             total = 0;
    uint64_t head = to_eight(4 * blocks);
    block_diff diff = block_diff_of(portable);
    if (head > most)
        return memcmp(base, changed, piece->nbytes) ? TOO_MANY_CHANGES : 0;
    memset(record, 0, head);
    for (uint64_t block = 0; block < blocks; block++) {
        uint64_t start = block * DIFF_BLOCK * itemsize;
        size_t found = diff(itemsize, base + start, changed + start, elements_of_block(elements, block),
                            record + head + 2 * total);
        uint32_t count = (uint32_t)found;
        memcpy(record + 4 * block, &count, 4);
        total += found;
        if (total && record_bytes(blocks, total, itemsize) > most)
            return TOO_MANY_CHANGES;
    }
    if (!total)
        return 0;
    uint8_t *places = record + head, *elements_at = places + to_eight(2 * total);
    memset(places + 2 * total, 0, (size_t)(elements_at - (places + 2 * total)));
    uint8_t *into = elements_at;
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        gather(itemsize, into, changed + block * DIFF_BLOCK * itemsize, places, count);
        places += 2 * (size_t)count;
        into += itemsize * count;
    }
    uint64_t size = record_bytes(blocks, total, itemsize);
    memset(into, 0, (size_t)(record + size - into));
    return (uint32_t)size;
}

/* Whether the places of a block ascend, and the last is below `elements`. */
static int places_ascend(const uint8_t *places, size_t count, size_t elements) {
    uint16_t before, place;
    unsigned wrong = 0;
    for (size_t i = 1; i < count; i++) {
        memcpy(&before, places + 2 * i - 2, 2);
        memcpy(&place, places + 2 * i, 2);
        wrong |= place <= before;
    }
    if (count)
        memcpy(&place, places + 2 * count - 2, 2);
    return !wrong && (!count || place < elements);
}

static int are_zeros(const uint8_t *from, const uint8_t *until) {
    unsigned found = 0;
    while (from < until)
        found |= *from++;
    return !found;
}

/* Whether the record can be that of the piece: then applying it writes inside of the piece only. */
static int has_own_record(const patch_piece *piece) {
    const uint8_t *record = (const uint8_t *)(uintptr_t)piece->record;
    uint64_t size = piece->size;
    uint64_t elements = piece->nbytes / piece->itemsize, blocks = blocks_of(elements), total = 0;
    uint64_t head = to_eight(4 * blocks);
    if (size < head)
        return 0;
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        if (count > elements_of_block(elements, block))
            return 0;
        total += count;
    }
    if (!total || size != record_bytes(blocks, total, piece->itemsize))
        return 0;
    const uint8_t *places = record + head, *elements_at = places + to_eight(2 * total);
    if (!are_zeros(record + 4 * blocks, places) || !are_zeros(places + 2 * total, elements_at) ||
        !are_zeros(elements_at + total * piece->itemsize, record + size))
        return 0;
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        if (!places_ascend(places, count, elements_of_block(elements, block)))
            return 0;
        places += 2 * (size_t)count;
    }
    return 1;
}

/* Write the elements of a record that `has_own_record` accepts over those of the piece. */
static void apply_record(const patch_piece *piece) {
    const uint8_t *record = (const uint8_t *)(uintptr_t)piece->record;
    uint8_t *into = (uint8_t *)(uintptr_t)piece->into;
    uint64_t elements = piece->nbytes / piece->itemsize, blocks = blocks_of(elements), total = 0;
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        total += count;
    }
    const uint8_t *places = record + to_eight(4 * blocks), *from = places + to_eight(2 * total);
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        scatter(piece->itemsize, into + block * DIFF_BLOCK * piece->itemsize, from, places, count);
        places += 2 * (size_t)count;
        from += (size_t)count * piece->itemsize;
    }
}

/* -- many pieces */

/* Whether memory is a whole number of elements; if not, set a Python error. */
static int is_piece(uint64_t nbytes, uint64_t itemsize) {
    int known = itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8;
    if (known && nbytes % itemsize == 0 && nbytes <= (uint64_t)1 << 30)
        return 1;
    PyErr_SetString(PyExc_ValueError, "a piece is not a whole number of elements of 1, 2, 4 or 8 bytes");
    return 0;
}

/* Write the records of pieces one after the other, and their sizes, as long as there is room for the next;
 * returns how many pieces are done. A record takes at most half of the bytes of its piece. */
static uint64_t diff_pieces_into(const diff_piece *pieces, uint64_t count, uint8_t *records, uint64_t room,
                                 uint32_t *sizes, int portable) {
    uint64_t used = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t most = pieces[i].nbytes / 2;
        if (used + most + DIFF_SLACK > room)
            return i;
        sizes[i] = diff_piece_into(&pieces[i], most, records + used, portable);
        used += sizes[i] == TOO_MANY_CHANGES ? 0 : sizes[i];
    }
    return count;
}

/* Make pieces from their bases, with the checksums of those of DIGEST_LEAST bytes or more, which are taken
 * while the bytes are in the cache; returns how many are done: it stops before a piece that fails
 * `has_own_record`. */
static uint64_t patch_pieces_into(const patch_piece *pieces, uint64_t count, uint64_t *sums) {
    for (uint64_t i = 0; i < count; i++) {
        const patch_piece *piece = &pieces[i];
        if (piece->size && !has_own_record(piece))
            return i;
        if (piece->into != piece->base)
            memcpy((void *)(uintptr_t)piece->into, (const void *)(uintptr_t)piece->base, piece->nbytes);
        if (piece->size)
            apply_record(piece);
        if (piece->nbytes >= DIGEST_LEAST)
            sums[i] = digest_copy_piece((const uint8_t *)(uintptr_t)piece->into, NULL, piece->nbytes, 0);
    }
    return count;
}

/* -- for Python */

/* diff_pieces(pieces, count, records, room, sizes, portable): see the types above; all but the counts are
 * addresses. */
PyObject *diff_pieces(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    uint64_t a[6], done;
    if (!parse_numbers(args, count, 6, a) || !is_memory(a[0], a[1]) || !is_memory(a[2], a[3]) ||
        !is_memory(a[4], a[1]))
        return NULL;
    const diff_piece *pieces = (const diff_piece *)(uintptr_t)a[0];
    for (uint64_t i = 0; i < a[1]; i++)
        if (!is_piece(pieces[i].nbytes, pieces[i].itemsize) || !is_memory(pieces[i].base, pieces[i].nbytes) ||
            !is_memory(pieces[i].changed, pieces[i].nbytes))
            return NULL;
    Py_BEGIN_ALLOW_THREADS;
    done = diff_pieces_into(pieces, a[1], (uint8_t *)(uintptr_t)a[2], a[3], (uint32_t *)(uintptr_t)a[4],
                            (int)a[5]);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLongLong(done);
}

/* patch_pieces(pieces, count, sums): make `count` pieces, described at address `pieces`, from their bases and
 * records. */
PyObject *patch_pieces(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    uint64_t a[3], done;
    if (!parse_numbers(args, count, 3, a) || !is_memory(a[0], a[1]) || !is_memory(a[2], a[1]))
        return NULL;
    const patch_piece *pieces = (const patch_piece *)(uintptr_t)a[0];
    for (uint64_t i = 0; i < a[1]; i++)
        if (!is_piece(pieces[i].nbytes, pieces[i].itemsize) || !is_memory(pieces[i].base, pieces[i].nbytes) ||
            !is_memory(pieces[i].into, pieces[i].nbytes) || !is_memory(pieces[i].record, pieces[i].size))
            return NULL;
    Py_BEGIN_ALLOW_THREADS;
    done = patch_pieces_into(pieces, a[1], (uint64_t *)(uintptr_t)a[2]);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLongLong(done);
}
