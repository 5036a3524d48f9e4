"""Row by row copies into paged and cyclic K/V storage (contracts 3.3 and 4.4).

Plain NumPy; dtypes are kept, because a write is a copy. An entry outside its storage (page id,
slot or table column) takes no write, whatever its sign: nothing wraps.
"""

import numpy as np


def write_pages(pages, rows, table, start, count):
    """Copies row j < count[b] to position start[b] + j of the pages that table[b] lists.

    Args:
      pages: [Hkv, P, page, D].
      rows:  [B, T, Hkv, D].
      table: [B, max_pages] page ids; an unmapped entry is out of range.
      start, count: [B].
    Returns:
      A new [Hkv, P, page, D].
    """
    out = np.array(pages)
    num_pages, page_size = out.shape[1:3]
    for b in range(rows.shape[0]):
        for j in range(min(int(count[b]), rows.shape[1])):
            column, offset = divmod(int(start[b]) + j, page_size)
            if not 0 <= column < table.shape[1]:
                continue
            page_id = int(table[b, column])
            if not 0 <= page_id < num_pages:
                continue
            for h in range(out.shape[0]):
                out[h, page_id, offset, :] = rows[b, j, h, :].astype(out.dtype)
    return out


def write_ring(ring, rows, slot, start, count):
    """Copies the last S of count[b] rows; position p goes to index p mod S of ring slot[b].

    Args:
      ring: [slots, Hkv, S, D].
      rows: [B, T, Hkv, D]; row j has position start[b] + j.
      slot, start, count: [B].
    Returns:
      A new [slots, Hkv, S, D].
    """
    out = np.array(ring)
    num_slots, num_heads, capacity, _ = out.shape
    for b in range(rows.shape[0]):
        if not 0 <= int(slot[b]) < num_slots:
            continue
        total = min(int(count[b]), rows.shape[1])
        for j in range(max(0, total - capacity), total):
            index = (int(start[b]) + j) % capacity
            for h in range(num_heads):
                out[int(slot[b]), h, index, :] = rows[b, j, h, :].astype(out.dtype)
    return out
