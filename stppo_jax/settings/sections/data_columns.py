"""The rules of config.data.columns."""

from stppo_jax.config import Config
from stppo_jax.types import hint
from stppo_jax.types import UserError

QUESTION_KEYS = (
    *('question', 'context', 'answers', 'options', 'answer_is'),
    *('passages', 'id', 'split'),
)
CONVERSATION_KEYS = ('messages', 'prompt', 'completion', 'tools', 'system', 'flag', 'split')
_MEANINGS = ('text', 'letter', 'index0', 'index1')
_LISTS = ('options', 'answers')  # keys that may have several columns


def check(config: Config) -> None:
  """Checks that the columns describe questions or conversations of a file."""
  columns = config.data.columns
  given = f'config.data.columns={columns!r}'
  known = dict.fromkeys((*QUESTION_KEYS, *CONVERSATION_KEYS))
  for key, value in columns.items():
    if key not in known:
      raise UserError(f'{given}: allowed keys are {", ".join(known)}{hint(key, [*known])}')
    if not _is_name(value) and not (key in _LISTS and _is_list(value)):
      or_list = ', or a list of names' if key in _LISTS else ''
      raise UserError(f'{given}: {key!r} must be the name of a column{or_list}')
  is_chat = 'messages' in columns or {'prompt', 'completion'} <= columns.keys()
  is_question = {'question', 'answers'} <= columns.keys()
  if is_chat == is_question:
    raise UserError(
        f"{given}: give 'question' and 'answers', or for conversations 'messages', or 'prompt' and "
        "'completion'"
    )
  allowed = CONVERSATION_KEYS if is_chat else QUESTION_KEYS
  if others := [key for key in columns if key not in allowed]:
    raise UserError(
        f'{given}: {others[0]!r} does not go with these: allowed are {", ".join(allowed)}'
    )
  meaning = columns.get('answer_is', 'text')
  if meaning not in _MEANINGS:
    raise UserError(f"{given}: 'answer_is' must be one of {', '.join(_MEANINGS)}")
  if meaning != 'text' and 'options' not in columns:
    raise UserError(f"{given}: 'answer_is' is {meaning!r}, which needs 'options'")
  if config.data.source == 'embedded':
    raise UserError(f'{given}: set --config.data.source=FILE, too, with these columns')


def _is_name(value: object) -> bool:
  return isinstance(value, str) and bool(value)


def _is_list(value: object) -> bool:
  return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_name, value))
