// Does one task with an agent that is made with the AI SDK: node ai_sdk.mjs PROVIDER MODEL TASK
// PROVIDER is the API: chat, responses or messages. The text of the answer is printed while it streams.
import { execSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [provider, name, prompt] = process.argv.slice(2);
const settings = { name: "tidegate", baseURL: `${process.env.SERVER_URL}/v1`, apiKey: "none" };
const models = {
  chat: () => createOpenAICompatible(settings)(name),
  responses: () => createOpenAI(settings).responses(name),
  messages: () => createAnthropic(settings)(name),
};
const tools = {
  shell: tool({
    description: "Runs a command and returns what it prints.",
    inputSchema: z.object({ command: z.string() }),
    execute: ({ command }) => execSync(command, { encoding: "utf8" }),
  }),
  write: tool({
    description: "Writes a file.",
    inputSchema: z.object({ path: z.string(), content: z.string() }),
    execute: ({ path, content }) => {
      writeFileSync(path, content);
      return "written";
    },
  }),
};
let failure;
const answer = streamText({
  model: models[provider](),
  system: "You are an agent.",
  prompt,
  tools,
  stopWhen: stepCountIs(20),
  onError: ({ error }) => {
    failure = error;
  },
});
for await (const text of answer.textStream) process.stdout.write(text);
console.log();
if (failure) {
  console.error(String(failure));
  process.exit(1);
}
