#define _GNU_SOURCE
#include "disk.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

static const int64_t SECOND_NS = 1000000000;

int torpor_disk_version(void)
{
    return TORPOR_DISK_VERSION;
}

/* Nonzero where the time does not fit: some file systems know more than 300 years each way. */
static int nanoseconds(struct statx_timestamp time, int64_t *found)
{
    return __builtin_mul_overflow((int64_t)time.tv_sec, SECOND_NS, found) ||
           __builtin_add_overflow(*found, (int64_t)time.tv_nsec, found);
}

/* By the system call: glibc has had statx since 2.28, and fstat as a symbol since 2.33 only. */
static int64_t look(int directory, const char *name, struct torpor_stat *found)
{
    const int flags = AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH | AT_NO_AUTOMOUNT; /* as lstat */
    struct statx st;
    if (syscall(SYS_statx, directory, name, flags, STATX_BASIC_STATS, &st))
        return errno;
    found->inode = st.stx_ino;
    found->size = (int64_t)st.stx_size;
    found->device = makedev(st.stx_dev_major, st.stx_dev_minor);
    found->mode = st.stx_mode;
    found->nlink = st.stx_nlink;
    found->uid = st.stx_uid;
    found->gid = st.stx_gid;
    found->blocks = (int64_t)st.stx_blocks;
    if (nanoseconds(st.stx_mtime, &found->mtime_ns) ||
        nanoseconds(st.stx_ctime, &found->ctime_ns) || nanoseconds(st.stx_atime, &found->atime_ns))
        return EOVERFLOW;
    return 0;
}

static uint8_t kind_of(const struct torpor_stat *st)
{
    const int file = S_ISREG(st->mode);
    if (st->error)
        return TORPOR_UNKNOWN;
    return (S_ISDIR(st->mode) ? TORPOR_DIRECTORY : 0) |
           (file && st->nlink > 1 ? TORPOR_SEVERAL_NAMES : 0) |
           (file && st->ctime_ns < st->atime_ns && st->atime_ns != st->mtime_ns ? TORPOR_READ : 0);
}

void torpor_look_at(int directory, const char *names, uint64_t count,
                    struct torpor_stat *found, uint8_t *signatures, uint8_t *kinds)
{
    for (uint64_t i = 0; i < count; names += strlen(names) + 1, i++) {
        found[i].error = look(directory, names, &found[i]);
        memcpy(signatures + i * TORPOR_SIGNATURE_BYTES, &found[i], TORPOR_SIGNATURE_BYTES);
        kinds[i] = kind_of(&found[i]);
    }
}

/* 0, TORPOR_SHORT or an errno. */
static int64_t read_whole(int file, uint64_t size, uint8_t *data)
{
    uint64_t done = 0;
    (void)lseek(file, 0, SEEK_DATA); /* takes the file's lock: a write that runs ends first */
    while (done < size) {
        ssize_t got = pread(file, data + done, size - done, (off_t)done);
        if (got < 0)
            return errno;
        if (got == 0)
            return TORPOR_SHORT;
        done += (uint64_t)got;
    }
    return 0;
}

void torpor_read_files(int directory, const char *names, const uint64_t *sizes,
                       uint64_t count, uint8_t *data, struct torpor_stat *before,
                       struct torpor_stat *after)
{
    const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    for (uint64_t i = 0; i < count; names += strlen(names) + 1, data += sizes[i], i++) {
        int64_t error;
        int file = openat(directory, names, flags | O_NOATIME);
        if (file < 0 && errno == EPERM) /* only the owner and root may leave the time alone */
            file = openat(directory, names, flags);
        if (file < 0) {
            after[i].error = errno;
            continue;
        }
        error = look(file, "", &before[i]);
        if (!error)
            error = S_ISREG(before[i].mode) ? read_whole(file, sizes[i], data) : EINVAL;
        if (!error)
            error = look(file, "", &after[i]);
        after[i].error = error;
        (void)close(file);
    }
}

static int fill(int file, const uint8_t *data, uint64_t size)
{
    uint64_t done = 0;
    while (done < size) {
        ssize_t put = pwrite(file, data + done, size - done, (off_t)done);
        if (put < 0)
            return errno;
        done += (uint64_t)put;
    }
    return 0;
}

static int dress(int file, const struct torpor_attributes *wanted, int owners)
{
    int64_t seconds = wanted->mtime_ns / SECOND_NS, rest = wanted->mtime_ns % SECOND_NS;
    if (rest < 0) { /* before 1970 */
        seconds -= 1;
        rest += SECOND_NS;
    }
    struct timespec time = {.tv_sec = (time_t)seconds, .tv_nsec = (long)rest};
    struct timespec times[2] = {time, time};
    if (owners && fchown(file, (uid_t)wanted->uid, (gid_t)wanted->gid))
        return errno;
    if (fchmod(file, (mode_t)wanted->mode)) /* after fchown, which clears set-user-ID */
        return errno;
    return futimens(file, times) ? errno : 0;
}

/* The signature of a complete file, where any later write is sure to change it: a write sets the
 * time of the last change to now, which must not be the time that was wanted. */
static void sign(int file, const struct torpor_attributes *wanted, uint64_t size,
                 uint8_t *signature)
{
    struct torpor_stat st;
    struct timespec now;
    if (look(file, "", &st) || clock_gettime(CLOCK_REALTIME, &now))
        return;
    if (wanted->mtime_ns / SECOND_NS >= now.tv_sec - 3)
        return;
    if (st.size != (int64_t)size || st.mtime_ns != wanted->mtime_ns || st.nlink != 1)
        return;
    memcpy(signature, &st, TORPOR_SIGNATURE_BYTES);
}

void torpor_write_files(int directory, const char *names, const uint8_t *data,
                        const uint64_t *offsets, const uint64_t *sizes,
                        const struct torpor_attributes *attributes, int owners, uint64_t count,
                        int32_t *errors, uint8_t *signatures)
{
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    memset(signatures, 0, count * TORPOR_SIGNATURE_BYTES);
    for (uint64_t i = 0; i < count; names += strlen(names) + 1, i++) {
        int file = openat(directory, names, flags, 0600);
        if (file < 0) {
            errors[i] = errno;
            continue;
        }
        errors[i] = fill(file, data + offsets[i], sizes[i]);
        if (!errors[i])
            errors[i] = dress(file, &attributes[i], owners);
        if (!errors[i])
            sign(file, &attributes[i], sizes[i], signatures + i * TORPOR_SIGNATURE_BYTES);
        if (close(file) && !errors[i])
            errors[i] = errno;
        if (errors[i]) { /* such as a full disk: nothing after it is begun */
            memset(signatures + i * TORPOR_SIGNATURE_BYTES, 0, TORPOR_SIGNATURE_BYTES);
            (void)unlinkat(directory, names, 0);
            for (uint64_t later = i + 1; later < count; later++)
                errors[later] = errors[i];
            return;
        }
    }
}
