/* The entries of a manifest, read as MessagePack where they lie: what each says, and to which
 * directory it belongs. docs/format.md has their fields.
 *
 * C only knows the plain form, which torpor writes. Where it finds anything else it says so, and
 * the caller asks Python, which knows every form and each refusal: torpor/shared/format/rows.py.
 *
 * Bounds: row i lies in `rows` from ends[i] to ends[i + 1], which do not fall; the other arrays
 * have as many elements as the number after them. Nothing else is read or written.
 */
#ifndef TORPOR_ENTRIES_H
#define TORPOR_ENTRIES_H
#include <stdint.h>

#define TORPOR_ENTRIES_VERSION 1 /* of these structures and functions: native.py asks for it */
#define TORPOR_NOT_PLAIN UINT64_MAX

int torpor_entries_version(void);

/* Find where each of `count` rows ends. The number of rows that are there and plain. */
uint64_t torpor_entry_ends(const uint8_t *rows, uint64_t bytes, uint64_t *ends, uint64_t count);

/* Check the claims M of docs/format.md that an entry alone can break, and the order of the names
 * of a directory. `plain`: bytes of each chunk. The number of rows, from the first on, that surely
 * break none; `linked` becomes 1 where one is a hard link. Not checked: that the directories are
 * there, that a directory's names stand together, and what hard links lead to. */
uint64_t torpor_check_entries(const uint8_t *rows, const uint64_t *ends, uint64_t count,
                              const uint32_t *plain, uint64_t chunks, uint64_t roots,
                              uint8_t *linked);

/* Which chunks the entries use, one byte each, and how many files, bytes and changed files there
 * are. 0 where a row is not plain or names a chunk that is not there. */
struct torpor_totals {
    uint64_t files, bytes, changed;
};
int torpor_count_entries(const uint8_t *rows, const uint64_t *ends, uint64_t count, uint8_t *used,
                         uint64_t chunks, struct torpor_totals *totals);

/* Of each entry its kind, root and size, and the chunk of which a file is one run, else
 * TORPOR_NO_CHUNK. 0 where a row is not plain. */
#define TORPOR_NO_CHUNK (-1)
int torpor_describe_entries(const uint8_t *rows, const uint64_t *ends, uint64_t count,
                            uint8_t *kinds, uint32_t *roots, int64_t *sizes, int64_t *chunks);

/* Put content into entries of files that have none yet: row i gets content `at[i]`, or none where
 * that is negative. A content is [size, extents, digest, changed] in MessagePack, and lies in
 * `contents` as a row does in `rows`. How many bytes `filled` got; TORPOR_NOT_PLAIN also where it has
 * no `room`. */
uint64_t torpor_fill_entries(const uint8_t *rows, const uint64_t *ends, uint64_t count,
                             const uint8_t *contents, const uint64_t *content_ends,
                             uint64_t content_count, const int64_t *at, uint8_t *filled,
                             uint64_t room, uint64_t *filled_ends);

/* A directory's entry, or a run: rows one after the other that are names of one directory. The
 * path of either lies in `rows`; the names of a run in `names`, with a zero byte between two. */
struct torpor_place {
    uint64_t row, root, path_at, path_bytes, is_run, names_at, names_bytes;
};

/* List the directories and runs from row `first` on, in order; `changed`: of each row, whether the
 * file changed while it was read. The row to go on from; fewer than `count` where there was no room
 * for more, and `first` itself where not even one run fits. TORPOR_NOT_PLAIN where a row is not
 * plain. Where `changed` is NULL, neither it nor `names` is written. */
uint64_t torpor_group_entries(const uint8_t *rows, const uint64_t *ends, uint64_t first,
                              uint64_t count, struct torpor_place *places, uint64_t room,
                              uint64_t *listed, uint8_t *names, uint64_t names_room,
                              uint8_t *changed);
#endif
