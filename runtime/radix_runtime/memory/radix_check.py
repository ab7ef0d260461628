"""What must hold of the radix tree, as code (I3, and I11, I12 of a single node)."""

from ..errors import require
from .radix_cache import RadixCache
from .radix_node import Node


def check_tree(cache: RadixCache) -> None:
    """Recounts everything that is kept as a counter, and looks at every node. O(pages). Raises
    InvariantViolation."""
    nodes = set(cache.nodes())
    for node in nodes:
        _check_node(cache, node)
    on_device = [node for node in nodes if not node.on_host]
    counts = (
        sum(len(node.pages) for node in on_device),
        sum(len(node.pages) for node in on_device if node.lock_count == 0),
        len(nodes),
    )
    kept = (cache.total_pages, cache.evictable_pages, cache.num_nodes)
    require(counts == kept, "I3", f"counters {kept} are not {counts}")
    queued = cache.queued()
    require(len(queued) == len(set(queued)), "I3", "a node is in the heap twice")
    marked = {node for node in nodes if node.queued}
    require(marked == nodes & set(queued), "I3", "heap and its marks differ")


def _check_node(cache: RadixCache, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    require(parent.children.get(node.edge) is node, "I3", "parent and child disagree")
    filled = 0 < len(node.pages) * cache.page_size == len(node.key)
    require(filled, "I3", "key and pages differ in length")
    extra_key = node.edge[0] if parent is cache.root else None  # type: ignore[index]
    edge = cache.edge(parent, node.key, 0, extra_key)
    require(edge == node.edge, "I3", "edge is not the first page")
    locked = parent is cache.root or parent.lock_count >= node.lock_count
    require(locked, "I3", "a child is locked more than its parent")
    found = node.queued or not cache.is_evictable(node)
    require(found, "I3", "an unlocked leaf is missing from the heap")
    on_device = sum(1 for child in node.children.values() if not child.on_host)
    require(node.num_device_children == on_device, "I3", "children on the device are miscounted")
    require(not node.on_host or on_device == 0, "I12", "a node below one on the host is not")
    whole = all(len(handles) == len(node.pages) for handles in node.handles)
    require(whole, "I11", "a node's handles are not one a page")
