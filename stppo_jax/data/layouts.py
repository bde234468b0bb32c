"""The layouts of published question sets: which columns they have and what the columns mean.

A layout is one record. `public_formats` reads a file by itself only if the file fits a record, and
no other column could name another answer. Everything else needs the setting data.columns.
"""

from collections.abc import Mapping
import dataclasses

# How a column names the right answer. An index counts the options from 0 or from 1.
CHOICE_KINDS = ('letter', 'index0', 'index1', 'text')
# 'any': the values of the file have to leave exactly one of CHOICE_KINDS.
ANY = 'any'
TRUTH = 'truth'  # true or false, which become the options yes and no
DECISION = 'decision'  # one of yes, no and maybe, which become options
USER = 'config.data.columns'  # the source of a layout that the user describes
NUMBER = 'number'  # a whole number that may be written with leading zeros
BOXED = 'boxed'  # a solution whose last \boxed{..} is the answer


@dataclasses.dataclass(frozen=True)
class SetLayout:
  """The columns of a published question set. `a.b` is the key b in the column a.

  Attributes:
    name: the sets with these columns.
    source: where the columns are described: the publisher's page.
    question: the column with the question, also as a prompt of messages.
    answers: the columns with the answer, and how each of them names it.
    options: the column with all options, several columns, or the first of a row of columns
      ('option_a..' means option_a, option_b and so on).
    wrong: columns with wrong options. The options are these and the answer, in alphabetical order.
    before: a text that the question is about.
    needs: further columns that tell this set from others with equal names.
    ignores: patterns of columns that look like an answer and are none, or are not needed.
    no_answer: answers that mean that there is none.
    flag: a column that is false where the answer of the row is wrong.
    spans: the column with several spans of a text. Spans apart from each other are parts of one
      answer, so that none of them is right alone.
    lacks: columns that this set does not have.
    is_family: whether the names are alternatives, as in 'question|problem'. The file has one of
      them. A family counts if no other layout fits.
    is_indexed: whether rows have an index and no id, and their questions a corpus of their own.
    suffix: the type of the files; empty: any.
    id: the column with the id, where the user names it.
    split: the column with the split, where the user names it.
    passages: the column with the passages, where the user names it.
    date: when the record was written.
  """

  name: str
  source: str
  question: str
  answers: Mapping[str, str]
  options: str | tuple[str, ...] = ''
  wrong: tuple[str, ...] = ()
  before: str = ''
  needs: tuple[str, ...] = ()
  ignores: tuple[str, ...] = ()
  no_answer: tuple[str, ...] = ()
  flag: str = ''
  lacks: tuple[str, ...] = ()
  is_family: bool = False
  spans: str = ''
  is_indexed: bool = False
  suffix: str = ''
  id: str = ''
  split: str = ''
  passages: str = ''
  date: str = '2026-11'


_HUB = 'huggingface.co/datasets/'
_VERL = ('prompt', 'extra_info.*', 'metadata.*', 'reward_model.*', 'golden_answers', 'answer*')
# Columns with whole articles, which are not read at all.
HEAVY = ('entity_pages', 'search_results')
_ARTICLES = ('entity_pages*', 'search_results*', 'answer.*', 'EntityPages', 'SearchResults')
_SPANS = ('answers.*', 'plausible_answers*')

_QUESTION_NAMES = 'question|Question|QUESTION|problem|query|Prompt|question_text|question_stem'
_ANSWER_NAMES = (
    'answer|Answer|final_answer|reference_answer|expected_answer|correct_answer|ground_truth|'
    'Correct Answer'
)
_OPTION_NAMES = (
    'answer|Answer|answer_idx|answerKey|answer_index|answer_letter|correct_answer|correct_option|'
    'correct_answer_num|correct|label|cop|golden_answers|Correct Answer'
)
# The formatter is off, so that each layout takes few lines.
# fmt: off
LAYOUTS = (
    # Answers that are texts.
    SetLayout('ASDiv', 'github.com/chaochun/nlu-asdiv-dataset', 'question', {'answer': 'text'},
           before='body'),
    SetLayout('SVAMP', 'github.com/arkilpatel/SVAMP', 'Question', {'Answer': 'text'},
           before='Body', ignores=('question_concat',)),
    SetLayout('MATH-500', _HUB + 'HuggingFaceH4/MATH-500', 'problem', {'answer': 'text'},
           needs=('subject', 'level', 'solution'), ignores=('solution',)),
    SetLayout('MATH (Hendrycks)', _HUB + 'EleutherAI/hendrycks_math', 'problem',
           {'solution': BOXED}, needs=('level', 'type')),
    SetLayout('NuminaMath 1.5', _HUB + 'AI-MO/NuminaMath-1.5', 'problem', {'answer': 'text'},
           needs=('question_type',), ignores=('solution*', '*_is_valid', 'correctness*',
                                                'generations*', 'messages'),
           no_answer=('proof', 'notfound')),
    SetLayout('AIME 2024 with years', _HUB + 'HuggingFaceH4/aime_2024', 'problem',
           {'answer': NUMBER}, needs=('year',), ignores=('solution',)),
    SetLayout('AIME 2024', _HUB + 'Maxwell-Jia/AIME_2024', 'Problem', {'Answer': NUMBER},
           ignores=('Solution',)),
    SetLayout('GAIA', _HUB + 'gaia-benchmark/GAIA', 'Question', {'Final answer': 'text'},
           ignores=('Annotator Metadata*',), no_answer=('?',)),
    SetLayout('DeepMath', _HUB + 'zwhe99/DeepMath-103K', 'question', {'final_answer': 'text'},
           needs=('topic',), ignores=('r1_solution*', 'answer')),
    SetLayout('OpenMathReasoning', _HUB + 'nvidia/OpenMathReasoning', 'problem',
           {'expected_answer': 'text'}, ignores=('generated_solution',)),
    SetLayout('MegaScience', _HUB + 'MegaScience/MegaScience', 'question',
           {'reference_answer': 'text'}, needs=('subject',), ignores=('answer',)),
    SetLayout('MGSM', _HUB + 'juletxara/mgsm', 'question', {'answer_number': 'text'},
           ignores=('answer', 'equation_solution')),
    SetLayout('FlashRAG, Search-R1', _HUB + 'RUC-NLPIR/FlashRAG_datasets', 'question',
           {'golden_answers': 'text'}, ignores=('metadata.*',)),
    SetLayout('MRQA, SQuAD of the authors, own files in tables', _HUB + 'mrqa-workshop/mrqa',
           'question', {'answers': 'text'}, spans='answers', ignores=('plausible_answers*',
           'detected_answers*', 'context_tokens*', 'question_tokens*')),
    SetLayout('MS MARCO', _HUB + 'microsoft/ms_marco', 'query', {'answers': 'text'},
           ignores=('passages*', 'wellFormedAnswers'), no_answer=('No Answer Present.',)),
    SetLayout('TruthfulQA', _HUB + 'truthfulqa/truthful_qa', 'question',
           {'correct_answers': 'text'},
           ignores=('best_answer', 'incorrect_answers')),
    SetLayout('SQuAD 1.1 and 2.0', 'rajpurkar.github.io/SQuAD-explorer', 'question',
           {'answers.text': 'text'}, ignores=_SPANS, spans='answers'),
    SetLayout('TriviaQA', _HUB + 'mandarjoshi/trivia_qa', 'question',
           {'answer.value': 'text', 'answer.aliases': 'text'}, ignores=_ARTICLES),
    SetLayout('TriviaQA of the authors', 'nlp.cs.washington.edu/triviaqa', 'Question',
           {'Answer.Value': 'text', 'Answer.Aliases': 'text'}, ignores=('Answer.*', *_ARTICLES)),
    SetLayout('PopQA', _HUB + 'akariasai/PopQA', 'question', {'possible_answers': 'text'},
           ignores=('obj', 'o_*', 's_aliases', '*_pop')),
    SetLayout('WikiQA', _HUB + 'microsoft/wiki_qa', 'question', {'answer': 'text'}, flag='label'),
    # Prompts of training sets.
    SetLayout('verl, Search-R1', 'verl.readthedocs.io', 'question',
           {'reward_model.ground_truth': 'text'}, ignores=_VERL, is_indexed=True),
    SetLayout('verl with a question in extra_info', 'verl.readthedocs.io', 'extra_info.question',
           {'reward_model.ground_truth': 'text'}, lacks=('question',), ignores=_VERL,
           is_indexed=True),
    SetLayout('verl with a prompt', 'verl.readthedocs.io', 'prompt',
           {'reward_model.ground_truth': 'text'}, lacks=('question', 'extra_info.question'),
           ignores=_VERL, is_indexed=True),
    SetLayout('rLLM in the columns of verl', 'github.com/rllm-org/rllm', 'extra_info.question',
           {'extra_info.ground_truth': 'text'}, needs=('reward_model',),
           ignores=('prompt', 'extra_info.*', 'reward_model.*'), is_indexed=True),
    SetLayout('SkyRL', 'github.com/NovaSky-AI/SkyRL', 'prompt',
           {'reward_spec.ground_truth': 'text'},
           ignores=('extra_info.*', 'reward_spec.*'), is_indexed=True),
    SetLayout('Tülu 3 and OLMo (RLVR)', _HUB + 'allenai/RLVR-GSM-MATH-IF-Mixed-Constraints',
           'messages', {'ground_truth': 'text'}),
    # A truth, or a decision.
    SetLayout('StrategyQA, BoolQ', _HUB + 'google/boolq', 'question', {'answer': TRUTH},
           ignores=('facts*', 'decomposition*', 'evidence*', 'term', 'description')),
    SetLayout('PubMedQA', 'github.com/pubmedqa/pubmedqa', 'question', {'final_decision': DECISION},
           ignores=('long_answer', 'context.*')),
    SetLayout('PubMedQA of the authors', 'github.com/pubmedqa/pubmedqa', 'QUESTION',
           {'final_decision': DECISION},
           ignores=('LONG_ANSWER', 'LABELS', 'MESHES', 'reasoning_*')),
    # Options in one column.
    SetLayout('MedQA', 'github.com/jind11/MedQA', 'question', {'answer_idx': ANY, 'answer': 'text'},
           'options', ignores=('metamap_phrases*',)),
    SetLayout('MMLU', _HUB + 'cais/mmlu', 'question', {'answer': 'index0'}, 'choices',
           needs=('subject',)),
    SetLayout('MMLU-Pro', _HUB + 'TIGER-Lab/MMLU-Pro', 'question',
           {'answer': 'letter', 'answer_index': 'index0'}, 'options', ignores=('cot_content',)),
    SetLayout('SuperGPQA', _HUB + 'm-a-p/SuperGPQA', 'question',
           {'answer_letter': 'letter', 'answer': 'text'}, 'options'),
    SetLayout('ZebraLogic', _HUB + 'allenai/ZebraLogicBench', 'question', {'answer': ANY},
           'choices', before='puzzle'),
    SetLayout('MuSR', _HUB + 'TAUR-Lab/MuSR', 'question',
           {'answer_index': 'index0', 'answer_choice': 'text'}, 'choices', before='narrative'),
    SetLayout('LogiQA 2.0', _HUB + 'baber/logiqa2', 'question', {'answer': 'index0'}, 'options',
           before='text', ignores=('type.*',)),
    SetLayout('LogiQA', _HUB + 'lucasmccabe/logiqa', 'query', {'correct_option': 'index0'},
           'options'),
    SetLayout('LogiQA of EleutherAI', _HUB + 'EleutherAI/logiqa', 'question', {'label': 'letter'},
           'options', needs=('context',)),
    SetLayout('ARC, CommonsenseQA, QASC', _HUB + 'allenai/ai2_arc', 'question',
           {'answerKey': 'letter'}, 'choices', ignores=('question_concept', 'formatted_question',
                                                'fact1', 'fact2', 'combinedfact')),
    SetLayout('ARC, CommonsenseQA, OpenBookQA of the authors', _HUB + 'allenai/ai2_arc',
           'question.stem', {'answerKey': 'letter'}, 'question.choices'),
    SetLayout('OpenBookQA', _HUB + 'allenai/openbookqa', 'question_stem', {'answerKey': 'letter'},
           'choices', ignores=('fact1',)),
    SetLayout('ReClor', _HUB + 'metaeval/reclor', 'question', {'label': 'index0'}, 'answers',
           needs=('id_string', 'context')),
    SetLayout('QuAIL', _HUB + 'textmachinelab/quail', 'question', {'correct_answer_id': 'index0'},
           'answers', needs=('context_id', 'context')),
    SetLayout('HellaSwag', _HUB + 'Rowan/hellaswag', 'ctx', {'label': 'index0'}, 'endings',
           ignores=('ctx_*', 'activity_label')),
    # A column for each option.
    SetLayout('MedMCQA of the hub', _HUB + 'openlifescienceai/medmcqa', 'question',
           {'cop': 'index0'}, 'opa..', suffix='.parquet'),
    SetLayout('MedMCQA of the authors', 'medmcqa.github.io', 'question', {'cop': 'index1'}, 'opa..',
           suffix='.json'),
    SetLayout('KMMLU', _HUB + 'HAERAE-HUB/KMMLU', 'question', {'answer': 'index1'}, 'A..',
           needs=('Category', 'Human Accuracy')),
    SetLayout('MMLU-ProX', _HUB + 'li-lab/MMLU-ProX', 'question',
           {'answer': 'letter', 'answer_index': 'index0'}, 'option_0..', ignores=('cot_content',)),
    SetLayout('Belebele of the hub', _HUB + 'facebook/belebele', 'question',
           {'correct_answer_num': 'index1'}, 'mc_answer1..', needs=('flores_passage',),
           ignores=('question_number',)),
    SetLayout('SocialIQA of the hub', _HUB + 'allenai/social_i_qa', 'question', {'label': 'index1'},
           'answerA..', needs=('context',)),
    SetLayout('CosmosQA of the hub', _HUB + 'allenai/cosmos_qa', 'question', {'label': 'index0'},
           'answer0..', needs=('context',)),
    SetLayout('COPA', _HUB + 'aps/super_glue', 'question', {'label': 'index0'}, 'choice1..',
           before='premise', ignores=('idx',)),
    SetLayout('PIQA', _HUB + 'baber/piqa', 'goal', {'label': 'index0'}, 'sol1..'),
    SetLayout('WinoGrande', _HUB + 'allenai/winogrande', 'sentence', {'answer': 'index1'},
           'option1..'),
    # The right option and the wrong ones.
    SetLayout('SciQ', _HUB + 'allenai/sciq', 'question', {'correct_answer': 'text'},
           wrong=('distractor1', 'distractor2', 'distractor3'), ignores=('support',)),
    SetLayout('GPQA', _HUB + 'Idavidrein/gpqa', 'Question', {'Correct Answer': 'text'},
           wrong=('Incorrect Answer 1', 'Incorrect Answer 2', 'Incorrect Answer 3'),
           ignores=('Pre-Revision *', 'Extra Revised *', '*Expert*', '*Validator*', '*Writer*',
                    'Explanation', '*domain*', '*_EV_*', '*_NEV_*',
                    'Self-reported*', 'Canary String', '*Correct*Answered*')),
    # Families: one of the usual names each. The values of the file decide what the answer means.
    SetLayout('NQ-open, HotpotQA, 2WikiMultiHopQA, MuSiQue, GSM8K, Bamboogle, FRAMES, SimpleQA, '
           'rLLM',
           _HUB + 'hotpotqa/hotpot_qa', _QUESTION_NAMES, {_ANSWER_NAMES: 'text'}, is_family=True,
           ignores=('evidences*', 'supporting_facts*', 'answer_id', 'image_preview*',
                    'rationale_image*')),
    SetLayout('MIRAGE, RACE, CMExam, AQuA, MedXpertQA', 'github.com/Teddy-XiongGZ/MIRAGE',
           _QUESTION_NAMES, {_OPTION_NAMES: ANY}, 'options|choices|Options|Choices',
           is_family=True),
    SetLayout('MMMLU, C-Eval, CMMLU, Global-MMLU, INCLUDE, MedMCQA as lines', _HUB + 'openai/MMMLU',
           _QUESTION_NAMES, {_OPTION_NAMES: ANY},
           'A..|opa..|option_a..|option_A..|option_0..|option_1..|option1..|optionA..|Option A..|'
           'choice_a..|choice_A..|choice0..|choice1..|choiceA..|answerA..|answer0..|answer1..|'
           'mc_answer1..|'
           'Option 1..|option0..|choice_0..|choice_1..', is_family=True),
)
# fmt: on
