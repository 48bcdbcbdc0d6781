// The openai SDK for Node: streaming equals not streaming. Usage: node openai.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const request = {
  model,
  messages: [{ role: "user", content: "Say hello in three words." }],
  temperature: 0,
  max_tokens: 12,
};
const whole = (await client.chat.completions.create(request)).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
if (!whole || whole !== streamed) {
  console.error({ whole, streamed });
  process.exit(1);
}
