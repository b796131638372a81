#include "entries.h"

#include <stddef.h>
#include <string.h>

enum { FILE_ENTRY, DIRECTORY, SYMLINK, HARDLINK };
enum { FIELDS = 13, EXTENT_FIELDS = 3, ATTRIBUTE_FIELDS = 2, CONTENT_FIELDS = 4 };
enum { FEW_ATTRIBUTES = 16 }; /* compared with each other */
static const int64_t HOLE = -1;

/* As in torpor/shared/format/checks.py. */
static const int64_t MAX_MODE = 07777, MAX_OWNER = UINT32_MAX - 1, MAX_FILE_BYTES = 1LL << 50;
static const uint64_t MAX_NAME_BYTES = 255, MAX_PATH_BYTES = 1 << 16, MAX_TARGET_BYTES = 4095;
static const uint64_t MAX_ATTRIBUTE_BYTES = 1 << 16, DIGEST_BYTES = 16;

struct cursor {
    const uint8_t *at, *end;
};

struct text {
    const uint8_t *at;
    uint64_t bytes;
};

struct array {
    struct cursor elements;
    uint64_t count;
};

struct entry {
    int64_t kind, root, mode, uid, gid, mtime_ns, size;
    struct text path, target, digest;
    struct array extents, attributes;
    int changed;
    const uint8_t *size_at, *target_at, *digest_at, *attributes_at; /* where these begin */
};

int torpor_entries_version(void)
{
    return TORPOR_ENTRIES_VERSION;
}

/* Each take_ moves on behind a value; 0 where there is another one, or none. */

static int take_number(struct cursor *from, unsigned bytes, uint64_t *number)
{
    if ((uint64_t)(from->end - from->at) < bytes)
        return 0;
    *number = 0;
    for (unsigned i = 0; i < bytes; i++)
        *number = *number << 8 | *from->at++;
    return 1;
}

static int take_head(struct cursor *from, uint8_t *head)
{
    if (from->at == from->end)
        return 0;
    *head = *from->at++;
    return 1;
}

static int take_int(struct cursor *from, int64_t *value)
{
    uint8_t head;
    uint64_t number;
    if (!take_head(from, &head))
        return 0;
    if (head < 0x80 || head >= 0xe0) {
        *value = (int8_t)head;
        return 1;
    }
    if (head < 0xcc || head > 0xd3)
        return 0;
    const int is_signed = head >= 0xd0;
    const unsigned bytes = 1u << (head - (is_signed ? 0xd0 : 0xcc));
    if (!take_number(from, bytes, &number) || (!is_signed && number > INT64_MAX))
        return 0;
    const unsigned unused = is_signed ? 64 - 8 * bytes : 0;
    *value = (int64_t)(number << unused) >> unused;
    return 1;
}

static int take_text(struct cursor *from, struct text *text)
{
    uint8_t head;
    if (!take_head(from, &head) || head < 0xc4 || head > 0xc6 ||
        !take_number(from, 1u << (head - 0xc4), &text->bytes) ||
        (uint64_t)(from->end - from->at) < text->bytes)
        return 0;
    text->at = from->at;
    from->at += text->bytes;
    return 1;
}

static int take_count(struct cursor *from, uint64_t *count)
{
    uint8_t head;
    if (!take_head(from, &head))
        return 0;
    if (head >= 0x90 && head <= 0x9f) {
        *count = head & 0x0f;
        return 1;
    }
    return (head == 0xdc || head == 0xdd) && take_number(from, head == 0xdc ? 2 : 4, count);
}

static int take_bool(struct cursor *from, int *value)
{
    uint8_t head;
    if (!take_head(from, &head) || (head != 0xc2 && head != 0xc3))
        return 0;
    *value = head == 0xc3;
    return 1;
}

static int take_extent(struct cursor *from, int64_t *chunk, int64_t *offset, int64_t *length)
{
    uint64_t fields;
    return take_count(from, &fields) && fields == EXTENT_FIELDS && take_int(from, chunk) &&
           take_int(from, offset) && take_int(from, length);
}

static int take_attribute(struct cursor *from, struct text *name, struct text *value)
{
    uint64_t fields;
    return take_count(from, &fields) && fields == ATTRIBUTE_FIELDS && take_text(from, name) &&
           take_text(from, value);
}

static int take_extents(struct cursor *from, struct array *extents)
{
    int64_t chunk, offset, length;
    if (!take_count(from, &extents->count))
        return 0;
    extents->elements = *from;
    for (uint64_t i = 0; i < extents->count; i++)
        if (!take_extent(from, &chunk, &offset, &length))
            return 0;
    return 1;
}

static int take_attributes(struct cursor *from, struct array *attributes)
{
    struct text name, value;
    if (!take_count(from, &attributes->count))
        return 0;
    attributes->elements = *from;
    for (uint64_t i = 0; i < attributes->count; i++)
        if (!take_attribute(from, &name, &value))
            return 0;
    return 1;
}

static int note(const struct cursor *from, const uint8_t **place)
{
    *place = from->at;
    return 1;
}

static int take_entry(struct cursor *from, struct entry *entry)
{
    uint64_t fields;
    return take_count(from, &fields) && fields == FIELDS && take_int(from, &entry->kind) &&
           take_int(from, &entry->root) && take_text(from, &entry->path) &&
           take_int(from, &entry->mode) && take_int(from, &entry->uid) &&
           take_int(from, &entry->gid) && take_int(from, &entry->mtime_ns) &&
           note(from, &entry->size_at) && take_int(from, &entry->size) &&
           take_extents(from, &entry->extents) && note(from, &entry->target_at) &&
           take_text(from, &entry->target) && note(from, &entry->digest_at) &&
           take_text(from, &entry->digest) && note(from, &entry->attributes_at) &&
           take_attributes(from, &entry->attributes) && take_bool(from, &entry->changed);
}

static int take_row(const uint8_t *rows, const uint64_t *ends, uint64_t row, struct entry *entry)
{
    struct cursor from = {rows + ends[row], rows + ends[row + 1]};
    return take_entry(&from, entry) && from.at == from.end;
}

uint64_t torpor_entry_ends(const uint8_t *rows, uint64_t bytes, uint64_t *ends, uint64_t count)
{
    struct cursor from = {rows, rows + bytes};
    struct entry entry;
    uint64_t row = 0;
    for (; row < count && take_entry(&from, &entry); row++)
        ends[row] = (uint64_t)(from.at - rows);
    return row;
}

static int is_same(struct text a, struct text b)
{
    return a.bytes == b.bytes && !memcmp(a.at, b.at, a.bytes);
}

static int is_before(struct text a, struct text b)
{
    const int order = memcmp(a.at, b.at, a.bytes < b.bytes ? a.bytes : b.bytes);
    return order < 0 || (order == 0 && a.bytes < b.bytes);
}

static int has_zero(struct text text)
{
    return memchr(text.at, 0, text.bytes) != NULL;
}

/* Cut a path behind its last slash. */
static void cut(struct text path, struct text *parent, struct text *name)
{
    uint64_t at = path.bytes;
    while (at > 0 && path.at[at - 1] != '/')
        at--;
    *name = (struct text){path.at + at, path.bytes - at};
    *parent = (struct text){path.at, at ? at - 1 : 0};
}

static int is_name(struct text name)
{
    return name.bytes > 0 && name.bytes <= MAX_NAME_BYTES &&
           !(name.at[0] == '.' && (name.bytes == 1 || (name.bytes == 2 && name.at[1] == '.')));
}

static int is_path(struct text path, struct text name)
{
    return path.bytes <= MAX_PATH_BYTES && path.at[0] != '/' && is_name(name) && !has_zero(path);
}

static int has_good_target(const struct entry *entry)
{
    const struct text target = entry->target;
    switch (entry->kind) {
    case FILE_ENTRY:
    case DIRECTORY:
        return target.bytes == 0;
    case SYMLINK:
        return target.bytes > 0 && target.bytes <= MAX_TARGET_BYTES && !has_zero(target);
    default:
        return entry->kind == HARDLINK;
    }
}

static int has_good_attributes(const struct entry *entry)
{
    struct cursor from = entry->attributes.elements;
    struct text names[FEW_ATTRIBUTES], value;
    const uint64_t count = entry->attributes.count;
    if (count > FEW_ATTRIBUTES)
        return 0;
    for (uint64_t i = 0; i < count; i++) {
        if (!take_attribute(&from, &names[i], &value) || names[i].bytes == 0 ||
            names[i].bytes > MAX_NAME_BYTES || has_zero(names[i]) ||
            value.bytes > MAX_ATTRIBUTE_BYTES)
            return 0;
        for (uint64_t j = 0; j < i; j++)
            if (is_same(names[i], names[j]))
                return 0;
    }
    return 1;
}

static int has_good_content(const struct entry *entry, const uint32_t *plain, uint64_t chunks)
{
    struct cursor from = entry->extents.elements;
    int64_t left = entry->size, chunk, offset, length;
    if (entry->kind != FILE_ENTRY)
        return entry->extents.count == 0 && entry->size == 0 && entry->digest.bytes == 0;
    if (left < 0 || left > MAX_FILE_BYTES ||
        (entry->digest.bytes != 0 && entry->digest.bytes != DIGEST_BYTES))
        return 0;
    for (uint64_t i = 0; i < entry->extents.count; i++) {
        if (!take_extent(&from, &chunk, &offset, &length) || length <= 0 || length > left ||
            offset < 0)
            return 0;
        left -= length;
        if (chunk == HOLE) {
            if (offset != 0)
                return 0;
            continue;
        }
        if (chunk < 0 || (uint64_t)chunk >= chunks || offset > plain[chunk] ||
            length > plain[chunk] - offset || (length != plain[chunk] && !entry->digest.bytes))
            return 0;
    }
    return left == 0;
}

uint64_t torpor_check_entries(const uint8_t *rows, const uint64_t *ends, uint64_t count,
                              const uint32_t *plain, uint64_t chunks, uint64_t roots,
                              uint8_t *linked)
{
    struct entry entry;
    struct text last_parent = {rows, 0}, last_name = {rows, 0}, parent, name;
    int64_t last_root = -1; /* no name stands before the first of a directory */
    uint64_t row = 0;
    for (; row < count && take_row(rows, ends, row, &entry); row++) {
        if (entry.root < 0 || (uint64_t)entry.root >= roots || entry.mode < 0 ||
            entry.mode > MAX_MODE || entry.uid < 0 || entry.uid > MAX_OWNER || entry.gid < 0 ||
            entry.gid > MAX_OWNER || !has_good_target(&entry) || !has_good_attributes(&entry) ||
            !has_good_content(&entry, plain, chunks))
            break;
        if (entry.path.bytes == 0) {
            if (entry.kind != DIRECTORY)
                break;
            last_root = -1;
            continue;
        }
        cut(entry.path, &parent, &name);
        if (!is_path(entry.path, name) ||
            (entry.root == last_root && is_same(parent, last_parent) &&
             !is_before(last_name, name)))
            break;
        last_root = entry.root;
        last_parent = parent;
        last_name = name;
        if (entry.kind == HARDLINK)
            *linked = 1;
    }
    return row;
}

int torpor_count_entries(const uint8_t *rows, const uint64_t *ends, uint64_t count, uint8_t *used,
                         uint64_t chunks, struct torpor_totals *totals)
{
    struct entry entry;
    int64_t chunk, offset, length;
    *totals = (struct torpor_totals){0, 0, 0};
    for (uint64_t row = 0; row < count; row++) {
        if (!take_row(rows, ends, row, &entry))
            return 0;
        struct cursor from = entry.extents.elements;
        for (uint64_t i = 0; i < entry.extents.count; i++) {
            if (!take_extent(&from, &chunk, &offset, &length) || chunk >= (int64_t)chunks)
                return 0;
            if (chunk >= 0)
                used[chunk] = 1;
        }
        if (entry.kind == FILE_ENTRY) {
            totals->files++;
            totals->bytes += (uint64_t)entry.size;
            totals->changed += (uint64_t)entry.changed;
        }
    }
    return 1;
}

int torpor_describe_entries(const uint8_t *rows, const uint64_t *ends, uint64_t count,
                            uint8_t *kinds, uint32_t *roots, int64_t *sizes, int64_t *chunks)
{
    struct entry entry;
    int64_t chunk, offset, length;
    for (uint64_t row = 0; row < count; row++) {
        if (!take_row(rows, ends, row, &entry) || entry.kind < FILE_ENTRY ||
            entry.kind > HARDLINK || entry.root < 0 || entry.root > UINT32_MAX)
            return 0;
        struct cursor from = entry.extents.elements;
        kinds[row] = (uint8_t)entry.kind;
        roots[row] = (uint32_t)entry.root;
        sizes[row] = entry.size;
        chunks[row] = TORPOR_NO_CHUNK;
        if (entry.extents.count == 1 && take_extent(&from, &chunk, &offset, &length) &&
            chunk >= 0 && length == entry.size)
            chunks[row] = chunk;
    }
    return 1;
}

static uint8_t *put(uint8_t *to, const uint8_t *from, const uint8_t *end)
{
    memcpy(to, from, (size_t)(end - from));
    return to + (end - from);
}

uint64_t torpor_fill_entries(const uint8_t *rows, const uint64_t *ends, uint64_t count,
                             const uint8_t *contents, const uint64_t *content_ends,
                             uint64_t content_count, const int64_t *at, uint8_t *filled,
                             uint64_t room, uint64_t *filled_ends)
{
    struct entry entry, content;
    uint8_t *to = filled;
    uint64_t fields;
    for (uint64_t row = 0; row < count; row++) {
        const uint8_t *const start = rows + ends[row], *const end = rows + ends[row + 1];
        const uint64_t left = room - (uint64_t)(to - filled);
        if ((uint64_t)(end - start) > left)
            return TORPOR_NOT_PLAIN;
        if (at[row] < 0) {
            to = put(to, start, end);
        } else {
            if ((uint64_t)at[row] >= content_count || !take_row(rows, ends, row, &entry))
                return TORPOR_NOT_PLAIN;
            struct cursor from = {contents + content_ends[at[row]],
                                  contents + content_ends[at[row] + 1]};
            if ((uint64_t)(from.end - from.at) > left - (uint64_t)(end - start) ||
                !take_count(&from, &fields) || fields != CONTENT_FIELDS ||
                !note(&from, &content.size_at) || !take_int(&from, &content.size) ||
                !take_extents(&from, &content.extents) || !note(&from, &content.digest_at) ||
                !take_text(&from, &content.digest) || from.end - from.at != 1)
                return TORPOR_NOT_PLAIN;
            to = put(to, start, entry.size_at);
            to = put(to, content.size_at, content.digest_at); /* size and extents */
            to = put(to, entry.target_at, entry.digest_at);
            to = put(to, content.digest_at, from.at);
            to = put(to, entry.attributes_at, end - 1);
            *to++ = *from.at; /* changed */
        }
        filled_ends[row] = (uint64_t)(to - filled);
    }
    return (uint64_t)(to - filled);
}

uint64_t torpor_group_entries(const uint8_t *rows, const uint64_t *ends, uint64_t first,
                              uint64_t count, struct torpor_place *places, uint64_t room,
                              uint64_t *listed, uint8_t *names, uint64_t names_room,
                              uint8_t *changed)
{
    struct entry entry;
    struct text parent, name;
    struct torpor_place *run = NULL;
    uint64_t made = 0, filled = 0, row = first;
    *listed = 0;
    for (; row < count; row++) {
        if (!take_row(rows, ends, row, &entry) || entry.root < 0)
            return TORPOR_NOT_PLAIN;
        if (changed)
            changed[row] = (uint8_t)entry.changed;
        const struct torpor_place place = {
            .row = row,
            .root = (uint64_t)entry.root,
            .path_at = (uint64_t)(entry.path.at - rows),
            .path_bytes = entry.path.bytes,
        };
        cut(entry.path, &parent, &name);
        if (run == NULL || entry.path.bytes == 0 || run->root != place.root ||
            !is_same(parent, (struct text){rows + run->path_at, run->path_bytes})) {
            first = row; /* all before it is complete */
            *listed = made;
            run = NULL;
        }
        if (room - made < 2)
            return first;
        if (entry.path.bytes > 0) {
            const uint64_t needed = name.bytes + (run ? 1 : 0);
            if (changed && names_room - filled < needed)
                return first;
            if (run == NULL) {
                run = &places[made++];
                *run = place;
                run->path_bytes = parent.bytes;
                run->is_run = 1;
                run->names_at = filled;
            } else if (changed) {
                names[filled++] = 0;
            }
            if (changed) {
                memcpy(names + filled, name.at, name.bytes);
                filled += name.bytes;
            }
            run->names_bytes = filled - run->names_at;
        }
        if (entry.kind == DIRECTORY)
            places[made++] = place;
    }
    *listed = made;
    return row;
}
