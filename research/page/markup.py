"""Markdown to HTML, as far as the pages of a study need it: text in, text out.

Headings, paragraphs, lists, tables, code, links, emphasis, intervals. Everything else is escaped.
"""

from collections.abc import Callable
import html
import re

_HEADING = re.compile(r'(#{1,6})\s+(.*)')
_ITEM = re.compile(r'(?:[-*]|\d+\.)\s+(.*)')
_IMAGE = re.compile(r'!\[(.*?)\]\((.*?)\)')
_INTERVAL = re.compile(r'\[(?:(?:&lt;)?[-+.\de]+(?:, |\])){2}')  # [.58, 1.2], escaped
_LONG = 30  # characters of a cell that may wrap


def to_html(text: str, image: Callable[[str, str], str]) -> str:
  """Returns the body of a page; `image` makes what stands for an image from (caption, path)."""
  made, lines, i = [], _joined(text.splitlines()), 0
  while i < len(lines):
    line = lines[i].strip()
    same = lambda matches, start=i: _run(lines, start, matches)
    if not line or line.startswith('<!--'):
      i += 1
    elif match := _HEADING.fullmatch(line):
      level = len(match[1])
      name = re.sub(r'[^a-z0-9]+', '-', match[2].lower()).strip('-')
      made.append(f'<h{level} id="{name}">{inline(match[2])}</h{level}>')
      i += 1
    elif match := _IMAGE.fullmatch(line):
      made.append(image(match[1], match[2]))
      i += 1
    elif line.startswith('```'):
      end = next((j for j in range(i + 1, len(lines)) if lines[j].startswith('```')), len(lines))
      made.append(f'<pre>{html.escape(chr(10).join(lines[i + 1 : end]))}</pre>')
      i = end + 1
    elif line.startswith('|'):
      rows = same(lambda x: x.startswith('|'))
      made.append(_table(rows))
      i += len(rows)
    elif _ITEM.fullmatch(line):
      items = same(lambda x: bool(_ITEM.fullmatch(x)))
      tag = 'ul' if line[0] in '-*' else 'ol'
      texts = ''.join(f'<li>{inline(item.split(maxsplit=1)[1])}</li>' for item in items)
      made.append(f'<{tag}>{texts}</{tag}>')
      i += len(items)
    else:
      starts = ('#', '|', '```', '!', '<!--')
      words = same(lambda x: bool(x) and not x.startswith(starts) and not _ITEM.fullmatch(x))
      words = words or [line]
      made.append(f'<p>{inline(" ".join(words))}</p>')
      i += len(words)
  return '\n'.join(made)


def _joined(lines):
  """Joins the indented lines that continue an item of a list to it."""
  joined: list[str] = []
  for line in lines:
    if line.startswith('  ') and joined and _ITEM.fullmatch(joined[-1].strip()):
      joined[-1] += ' ' + line.strip()
    else:
      joined.append(line)
  return joined


def inline(text: str) -> str:
  """Returns a line with its code, links, emphasis and intervals as HTML; the rest is escaped."""
  parts = re.split(r'(`[^`]*`)', text)
  return ''.join(
      f'<code>{html.escape(part[1:-1])}</code>' if i % 2 else _emphasised(html.escape(part))
      for i, part in enumerate(parts)
  )


def _emphasised(text):
  text = re.sub(r'\[([^\]]+)\]\(([^)\s]+)\)', r'<a href="\2">\1</a>', text)
  text = _INTERVAL.sub(r'<span class="interval">\g<0></span>', text)
  text = re.sub(r'\*\*(.+?)\*\*', r'<strong>\1</strong>', text)
  return re.sub(r'(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])', r'<em>\1</em>', text)


def _run(lines, start, matches):
  """Returns the stripped lines from `start` on that match."""
  found = []
  for line in lines[start:]:
    if not matches(line.strip()):
      break
    found.append(line.strip())
  return found


def _table(rows):
  cells = [[cell.strip() for cell in row.strip('|').split('|')] for row in rows]
  head, marks, *body = cells

  def kind(mark, text):
    kinds = ['text'] * (not mark.endswith(':')) + ['long'] * (len(text) > _LONG)
    return f' class="{" ".join(kinds)}"' if kinds else ''

  def line(row, tag):  # a name of several parts may wrap between them
    cells = [re.sub(r'(?<=\w)([+.])(?=[a-z])', r'\1<wbr>', inline(cell)) for cell in row]
    kinds = map(kind, marks, row)
    return ''.join(f'<{tag}{kind}>{cell}</{tag}>' for cell, kind in zip(cells, kinds))

  return (
      f'<div class="scroll"><table><thead><tr>{line(head, "th")}</tr></thead><tbody>'
      + ''.join(f'<tr>{line(row, "td")}</tr>' for row in body)
      + '</tbody></table></div>'
  )
