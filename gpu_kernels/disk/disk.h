/* Many small files at once: look at them, read them, write them.
 *
 * A call takes names below one open directory and works through them in order. Whatever is not
 * plain (a name that is taken, a file that shrinks, a full disk) is left with its errno, and the
 * caller does that file again by itself: torpor/machine/tree/batch.py.
 *
 * Bounds: `count` elements in each array; as many names one after the other, each with a zero byte
 * at its end; files lie in `data` one after the other as `sizes` or `offsets` say. Nothing else is
 * read or written.
 */
#ifndef TORPOR_DISK_H
#define TORPOR_DISK_H
#include <stdint.h>

#define TORPOR_DISK_VERSION 4 /* of these structures and functions: native.py asks for it */
#define TORPOR_SHORT (-1) /* the file has fewer bytes than it had */

int torpor_disk_version(void);

/* What lstat says, and `error`: 0 or an errno; EOVERFLOW for a time that does not fit. */
struct torpor_stat {
    uint64_t inode;
    int64_t size, mtime_ns, ctime_ns;
    uint64_t device;
    int64_t mode, nlink, uid, gid, blocks, atime_ns, error;
};

#define TORPOR_SIGNATURE_BYTES 32 /* the first four fields: they change whenever a file does */

/* What a name is, as bits. READ: a file, since its last change; a restore sets atime to mtime. */
enum { TORPOR_DIRECTORY = 1, TORPOR_SEVERAL_NAMES = 2, TORPOR_READ = 4, TORPOR_UNKNOWN = 128 };

struct torpor_attributes {
    int64_t mode, uid, gid, mtime_ns;
};

/* Look at each name itself, not at what a symlink leads to; an empty name is the directory. */
void torpor_look_at(int directory, const char *names, uint64_t count,
                    struct torpor_stat *found, uint8_t *signatures, uint8_t *kinds);

/* Read files whole, never through a symlink as the last part of a name, and without moving their
 * access times where the kernel allows that. `before` and `after`: as each was when it was open. */
void torpor_read_files(int directory, const char *names, const uint64_t *sizes,
                       uint64_t count, uint8_t *data, struct torpor_stat *before,
                       struct torpor_stat *after);

/* Make new files with content and attributes; `owners`: their owners too. Where one cannot be
 * filled or dressed, it is removed, and none after it is begun. `signatures`: of each file when it
 * was complete; zeros where a later write might not change it. */
void torpor_write_files(int directory, const char *names, const uint8_t *data,
                        const uint64_t *offsets, const uint64_t *sizes,
                        const struct torpor_attributes *attributes, int owners, uint64_t count,
                        int32_t *errors, uint8_t *signatures);
#endif
